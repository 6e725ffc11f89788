"""Training with random changes between the steps, compiled on a mesh against CPU torch.

A sequence is drawn once, from its seed, and then runs in both worlds: steps of training, and
between them one or two of the changes that a user makes. Losses, parameters, buffers, gradients and
optimizer state are compared after every step.
"""

from __future__ import annotations

import collections
import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from tests.compilation.changes import EagerMesh, Mesh, Observation, World, assert_same, observe
from tests.compilation.changes._world import numbers

STEPS = 5


class Model(nn.Module):
    """What the models share: a number and a parameter that users change."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.extra: nn.Parameter | None = None

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        out = out * self.scale
        return out if self.extra is None else out + self.extra.sum()


class MLP(Model):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.dropout, self.down = nn.Dropout(0.0), nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.stack([(tokens * k).float().cos() for k in range(1, 7)], -1).mean(1)
        return self.finish(self.down(self.dropout(torch.tanh(self.norm(self.up(x))))))


class Attention(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.qkv, self.down = nn.Linear(8, 24), nn.Linear(8, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.finish(self.down(x + out.transpose(1, 2).flatten(2)))


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 10, bias=False)
        self.embedding.weight.data.mul_(0.3)  # of a head's size

    def tie(self) -> None:
        self.down.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.finish(self.down(self.norm(F.gelu(self.up(self.embedding(tokens))))))


MODELS: dict[str, type[Model]] = {"mlp": MLP, "attention": Attention, "tied": Tied}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01, eps=1e-2),
    "adamw": lambda p: AdamW(p, lr=0.01, eps=1e-2, weight_decay=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, eps=1e-2),
    # Its first step would divide a gradient, rounding error and all, by its own size.
    "adagrad": lambda p: Adagrad(p, lr=0.05, eps=1e-2, initial_accumulator_value=0.1),
}


class Session:
    """A model and its optimizer in a world, and what a user holds besides them."""

    def __init__(self, world: World, model: str, optimizer: str) -> None:
        self.world = world
        self.model: Any = world.module(MODELS[model]())
        if model == "tied":
            self.model.tie()
        self.make = OPTIMIZERS[optimizer]
        self.optimizer = self.make(self.model.parameters())
        self.handles: list[Any] = []
        self.saved = self.weights()
        self.size = 4

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def train(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step of training, as users write it."""
        out = self.model(tokens)
        targets = tokens[:, 0] % 4 if out.ndim == 2 else tokens
        loss = out.pow(2).mean() + F.cross_entropy(out.flatten(0, -2), targets.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def tokens(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.world.tensor(torch.randint(0, 10, (self.size, 5), generator=generator))

    def parameter(self, rng: random.Random) -> nn.Parameter:
        return rng.choice(list(self.model.parameters()))

    def groups(self, rng: random.Random, **settings: Any) -> None:
        rng.choice(self.optimizer.param_groups).update(settings)


Change = Callable[[Session, random.Random], Any]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


@change
def lr(s: Session, rng: random.Random) -> None:
    s.groups(rng, lr=rng.choice([0.0, 0.001, 0.02, 0.05]))


@change
def weight_decay(s: Session, rng: random.Random) -> None:
    s.groups(rng, weight_decay=rng.choice([0, 0.1, 1]))


@change
def own_setting(s: Session, rng: random.Random) -> None:
    key, values = rng.choice(
        {
            SGD: [("momentum", (0.5, 0.9)), ("dampening", (0, 0.5)), ("maximize", (True, False))],
            RMSprop: [("alpha", (0.5, 0.9)), ("maximize", (True, False))],
            Adagrad: [("lr_decay", (0, 0.1)), ("maximize", (True, False))],
        }.get(
            type(s.optimizer),
            [("betas", ((0.5, 0.9), (0.8, 0.99))), ("maximize", (True, False))],
        )
    )
    s.groups(rng, **{key: rng.choice(values)})


@change
def eps(s: Session, rng: random.Random) -> None:
    if "eps" in s.optimizer.defaults:
        s.groups(rng, eps=rng.choice([1e-2, 0.1, 1]))


@change
def foreach(s: Session, rng: random.Random) -> None:
    s.groups(rng, foreach=rng.choice([True, False, None]))


@change
def freeze(s: Session, rng: random.Random) -> None:
    s.parameter(rng).requires_grad_(False)


@change
def unfreeze(s: Session, rng: random.Random) -> None:
    s.model.requires_grad_(True)


@change
def evaluation(s: Session, rng: random.Random) -> None:
    s.model.eval()


@change
def training(s: Session, rng: random.Random) -> None:
    s.model.train()


@change
def mode_of_the_norm(s: Session, rng: random.Random) -> None:
    s.model.norm.train(not s.model.norm.training)


@change
def eps_of_the_norm(s: Session, rng: random.Random) -> None:
    s.model.norm.eps = rng.choice([1e-5, 0.1, 1.0])


@change
def forward_hook(s: Session, rng: random.Random) -> None:
    by = rng.choice([0.5, 2.0])
    s.handles.append(s.model.norm.register_forward_hook(lambda m, i, out: out * by))


@change
def forward_pre_hook(s: Session, rng: random.Random) -> None:
    s.handles.append(s.model.down.register_forward_pre_hook(lambda m, inputs: (inputs[0] * 0.5,)))


@change
def tensor_hook(s: Session, rng: random.Random) -> None:
    parameter = s.parameter(rng)
    if parameter.requires_grad:
        s.handles.append(parameter.register_hook(lambda grad: grad * 0.5))


@change
def hook_removed(s: Session, rng: random.Random) -> None:
    if s.handles:
        s.handles.pop(rng.randrange(len(s.handles))).remove()


@change
def data(s: Session, rng: random.Random) -> None:
    parameter = s.parameter(rng)
    parameter.data = parameter.data * 0.9


@change
def in_place(s: Session, rng: random.Random) -> None:
    with torch.no_grad():
        s.parameter(rng).mul_(0.9)


@change
def save(s: Session, rng: random.Random) -> None:
    s.saved = s.weights()


@change
def load(s: Session, rng: random.Random) -> None:
    if s.saved.keys() == s.weights().keys():
        s.model.load_state_dict(s.saved)


@change
def load_assigned(s: Session, rng: random.Random) -> None:
    """New parameters, and an optimizer of their own."""
    s.handles = []
    if s.saved.keys() == s.weights().keys():
        s.model.load_state_dict(
            {name: value.clone() for name, value in s.saved.items()}, assign=True
        )
        s.optimizer = s.make(s.model.parameters())


@change
def optimizer_loaded(s: Session, rng: random.Random) -> None:
    s.optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict()))


@change
def optimizer_new(s: Session, rng: random.Random) -> None:
    s.optimizer = s.make(s.model.parameters())


@change
def optimizer_state_cleared(s: Session, rng: random.Random) -> None:
    if isinstance(s.optimizer, Adagrad):  # its state is made with it, and missed
        return
    s.optimizer.state.clear()


@change
def optimizer_state_in_place(s: Session, rng: random.Random) -> None:
    for state in s.optimizer.state.values():
        for key, value in state.items():
            if key != "step" and value is not None:
                value.mul_(0.5)


@change
def gradients_zeroed(s: Session, rng: random.Random) -> None:
    s.optimizer.zero_grad(set_to_none=rng.random() < 0.5)


@change
def one_gradient_dropped(s: Session, rng: random.Random) -> None:
    s.parameter(rng).grad = None


@change
def gradient_set(s: Session, rng: random.Random) -> None:
    parameter = s.parameter(rng)
    parameter.grad = torch.full_like(parameter, 0.1)


@change
def eager_step(s: Session, rng: random.Random) -> None:
    s.train(s.tokens(rng.randrange(100)))


@change
def eager_backward(s: Session, rng: random.Random) -> None:
    if any(p.requires_grad for p in s.model.parameters()):
        s.model(s.tokens(rng.randrange(100))).pow(2).mean().backward()


@change
def group_added(s: Session, rng: random.Random) -> None:
    if s.model.extra is None:
        s.model.extra = s.world.parameter(numbers(rng.randrange(100), 8) * 0.1, None)
        s.optimizer.add_param_group({"params": [s.model.extra], "lr": 0.02})


@change
def attribute(s: Session, rng: random.Random) -> None:
    s.model.scale = rng.choice([0.5, 1, 1.5])


@change
def layer_replaced(s: Session, rng: random.Random) -> None:
    if not isinstance(s.model, Tied):
        old = s.model.down
        new = nn.Linear(old.in_features, old.out_features)
        for i, parameter in enumerate(new.parameters()):
            parameter.data.copy_(numbers(rng.randrange(100) + i, *parameter.shape) * 0.3)
        s.model.down = s.world.module(new)
        if rng.random() < 0.7:
            s.optimizer.add_param_group({"params": list(s.model.down.parameters())})


@change
def batch_size(s: Session, rng: random.Random) -> None:
    s.size = rng.choice([4, 6])


def plan(seed: str) -> list[list[tuple[str, int]]]:
    """For each step, the changes before it, with the seeds of what they draw."""
    rng = random.Random(seed)
    changes = [[]]
    for _ in range(STEPS - 1):
        names = rng.sample(list(CHANGES), rng.choice([0, 1, 1, 2]))
        changes.append([(name, rng.randrange(1000)) for name in names])
    return changes


def program(world: World, model: str, optimizer: str, changes: list[list[tuple[str, int]]]):
    session = Session(world, model, optimizer)
    step = world.compile(lambda tokens: session.train(tokens))
    for i, before in enumerate(changes):
        for name, seed in before:
            CHANGES[name](session, random.Random(seed))
        if not any(p.requires_grad for p in session.model.parameters()):
            session.model.requires_grad_(True)
        loss = step(session.tokens(i))
        # Anew, as changes put other objects in their places.
        world.watch(model=session.model, optimizer=session.optimizer)
        yield loss


def observations(world: World, model: str, optimizer: str, seed: int) -> Iterator[Observation]:
    torch.manual_seed(seed)
    changes = plan(f"{model} {optimizer} {seed}")
    return observe(program(world, model, optimizer, changes), world)


def check(world: World, model: str, optimizer: str, seed: int) -> None:
    expected = list(observations(World(), model, optimizer, seed))
    for i, actual in enumerate(observations(world, model, optimizer, seed)):
        assert_same(actual, expected[i], f"step {i} of {plan(f'{model} {optimizer} {seed}')}")
        assert torch.isfinite(expected[i].results["result"])
    assert i == STEPS - 1


@pytest.mark.one_in(144)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("model", list(MODELS))
def test_compiled_as_torch(mesh_2x4: DeviceMesh, model: str, optimizer: str, seed: int) -> None:
    check(Mesh(mesh_2x4), model, optimizer, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("model", list(MODELS))
def test_eagerly_as_torch(mesh_2x4: DeviceMesh, model: str, optimizer: str, seed: int) -> None:
    """The same without `xd.compile`: a sequence that fails here too says nothing about it."""
    check(EagerMesh(mesh_2x4), model, optimizer, seed)


def test_every_change_is_drawn() -> None:
    drawn = collections.Counter[str]()
    for model, optimizer, seed in itertools.product(MODELS, OPTIMIZERS, range(20)):
        for changes in plan(f"{model} {optimizer} {seed}"):
            drawn.update(name for name, _ in changes)
    assert drawn.keys() == CHANGES.keys() and min(drawn.values()) > 10, drawn
