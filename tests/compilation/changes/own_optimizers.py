"""Optimizers as others write them, from the formulas of their papers: each with the habits (Python
numbers in groups and state, lists, items, modes) that compiled steps have to do with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Muon, Optimizer

from tests.compilation.changes._table import Program, mlp, row, rows, trainer
from tests.compilation.changes._world import World


class Own(Optimizer):
    """``update`` of each parameter, without gradients, between `begin` and `end` of a group."""

    options: dict[str, Any] = {}

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **self.options, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
            self.end(group)
        return loss

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def end(self, group: dict[str, Any]) -> None:
        pass

    def update(
        self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class Lion(Own):
    """Chen et al. 2023: the sign of a mix of the momentum and the gradient."""

    options = {"betas": (0.9, 0.99), "weight_decay": 0.1}

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        mixed = state["momentum"] * beta1 + grad * (1 - beta1)
        # Not the sign, which rounding decides near zero.
        p.add_(torch.tanh(100 * mixed), alpha=-group["lr"])
        state["momentum"].lerp_(grad, 1 - beta2)


class Factored(Own):
    """Adafactor (Shazeer and Stern 2018), with a step count that is a Python number in the state,
    and a learning rate that falls with it."""

    options = {"eps": (1e-30, 1e-3), "clip": 1.0, "power": -0.8}

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if not state:
            state["step"] = 0
            state["rms"] = 0
            if grad.ndim > 1:
                state["rows"] = torch.zeros_like(grad).mean(-1)
                state["columns"] = torch.zeros_like(grad).mean(-2)
            else:
                state["square"] = torch.zeros_like(grad)
        state["step"] += 1
        state["rms"] = p.square().mean().sqrt()
        scale = torch.clamp(state["rms"], min=group["eps"][1])
        lr = min(group["lr"], 1.0 / math.sqrt(state["step"]))
        decay = 1.0 - math.pow(state["step"], group["power"])
        square = grad.square() + group["eps"][0]
        if grad.ndim > 1:
            state["rows"].mul_(decay).add_(square.mean(-1), alpha=1 - decay)
            state["columns"].mul_(decay).add_(square.mean(-2), alpha=1 - decay)
            rows_, columns = state["rows"], state["columns"]
            square = (rows_ / rows_.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)
        else:
            square = state["square"].mul_(decay).add_(square, alpha=1 - decay)
        update = grad * square.rsqrt()
        update = update / (update.square().mean().sqrt() / group["clip"]).clamp(min=1.0)
        p.add_(-lr * scale * update)


def root(matrix: torch.Tensor, power: float) -> torch.Tensor:
    """A symmetric matrix to a power."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** power) @ vectors.T


class Shampoo(Own):
    """Gupta et al. 2018: preconditioners in a list, made anew every other step."""

    options = {"every": 2, "step": 0}

    def begin(self, group: Any) -> None:
        group["step"] += 1

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if not state:
            state["sums"] = [torch.eye(n, device=p.device) * 0.1 for n in p.shape]
            state["roots"] = [torch.eye(n, device=p.device) for n in p.shape]
        for i, total in enumerate(state["sums"]):
            flat = grad.movedim(i, 0).reshape(p.shape[i], -1)
            total.add_(flat @ flat.T)
        if group["step"] % group["every"] == 0:
            state["roots"] = [root(total, -0.5 / p.ndim) for total in state["sums"]]
        for i, precondition in enumerate(state["roots"]):
            grad = torch.tensordot(precondition, grad, dims=([1], [i])).movedim(0, i)
        p.add_(grad, alpha=-group["lr"])


class Soap(Own):
    """Vyas et al. 2024: Adam in the eigenbasis of Shampoo's preconditioner."""

    options = {"betas": (0.9, 0.95), "every": 3}

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if "step" not in state:
            state["step"] = 0
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
            state["sums"] = [torch.eye(n, device=p.device) * 1e-3 for n in p.shape]
            state["bases"] = None
        state["step"] += 1
        beta1, beta2 = group["betas"]
        for i, total in enumerate(state["sums"]):
            flat = grad.movedim(i, 0).reshape(p.shape[i], -1)
            # A number on the diagonal that tells the eigenvectors apart.
            apart = torch.diag(torch.arange(p.shape[i], device=p.device) * 1e-2)
            total.lerp_(flat @ flat.T + apart, 1 - beta2)
        if state["bases"] is None or state["step"] % group["every"] == 0:
            state["bases"] = [torch.linalg.eigh(total)[1] for total in state["sums"]]
        state["mean"].lerp_(grad, 1 - beta1)
        turned, mean = self.turn(grad, state["bases"]), self.turn(state["mean"], state["bases"])
        state["square"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        update = mean / (state["square"].sqrt() + 1e-3)
        p.add_(self.turn(update, [basis.T for basis in state["bases"]]), alpha=-size)

    def turn(self, value: torch.Tensor, bases: list[torch.Tensor]) -> torch.Tensor:
        for i, basis in enumerate(bases):
            value = torch.tensordot(basis.T, value, dims=([1], [i])).movedim(0, i)
        return value


class Orthogonal(Own):
    """Muon (Jordan 2024): momentum made orthogonal; of vectors, Adam with a count of its own."""

    options = {"momentum": 0.95, "nesterov": True, "steps": 3}

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if p.ndim < 2:
            state["count"] = state.get("count", 0) + 1
            p.add_(grad, alpha=-group["lr"] / state["count"])
            return
        if "buffer" not in state:
            state["buffer"] = torch.zeros_like(grad)
        buffer = state["buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        update = update / (update.norm() + 1e-7)
        for _ in range(group["steps"]):
            product = update @ update.T
            update = 2.0 * update - 1.5 * product @ update + 0.5 * product @ product @ update
        p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


class ScheduleFree(Own):
    """Defazio et al. 2024: the average of the iterates, its weights in the group, and a mode."""

    options = {"beta": 0.9, "k": 0, "train_mode": False, "weight_sum": 0.0, "lr_max": -1.0}
    options |= {"warmup": 3, "power": 2.0}

    def train(self) -> None:
        self.switch(True)

    def eval(self) -> None:
        self.switch(False)

    @torch.no_grad()
    def switch(self, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != training:
                beta = group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - beta if training else 1 - 1 / beta)
                group["train_mode"] = training

    def begin(self, group: Any) -> None:
        if not group["train_mode"]:
            raise RuntimeError("call train() first")
        k = group["k"]
        lr = group["lr"] * ((k + 1) / group["warmup"] if k < group["warmup"] else 1.0)
        group["now"] = lr
        group["lr_max"] = max(lr, group["lr_max"])
        weight = group["lr_max"] ** group["power"]
        group["weight_sum"] = group["weight_sum"] + weight
        group["c"] = weight / group["weight_sum"]

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if "z" not in state:
            state["z"] = torch.clone(p)
        p.lerp_(state["z"], group["c"])
        p.add_(grad, alpha=group["now"] * (group["beta"] * (1 - group["c"]) - 1))
        state["z"].sub_(grad, alpha=group["now"])

    def end(self, group: Any) -> None:
        group["k"] += 1


class Counting(Own):
    """A step count that it puts into the group itself."""

    def begin(self, group: Any) -> None:
        if "step" in group:
            group["step"] += 1
        else:
            group["step"] = 1

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        p.add_(grad, alpha=-group["lr"] / group["step"] ** 0.5)


class Items(Own):
    """Adam whose count is a CPU tensor, as torch's own has it, of ints; its item is a number."""

    options = {"betas": (0.9, 0.99)}

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if not state:
            state["step"] = torch.tensor(0)
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        count = state["step"].item()
        beta1, beta2 = group["betas"]
        state["mean"].lerp_(grad, 1 - beta1)
        state["square"].lerp_(grad.square(), 1 - beta2)
        root = (state["square"] / (1 - beta2**count)).sqrt().add_(1e-8)
        p.addcdiv_(state["mean"] / (1 - beta1**count), root, value=-group["lr"])


class FloatItems(Own):
    """A count of floats, by which it leaves every third step out."""

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
        state["step"] += 1
        count = state["step"].item()
        if count % 3:
            p.add_(grad, alpha=-group["lr"] / count)


class Replacing(Own):
    """Adam written without operations in place: its state is other tensors after each step, the
    count, too, and the last gradient is one, itself."""

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if not state:
            zero = torch.zeros_like(p)
            state |= {"count": torch.zeros((), device=p.device), "moments": (zero, zero)}
            state["before"] = torch.zeros_like(p)
        mean, square = state["moments"]
        state["count"] = state["count"] + 1
        state["moments"] = 0.9 * mean + 0.1 * grad, 0.99 * square + 0.01 * grad * grad
        mean, square = state["moments"]
        size = group["lr"] / (1 - 0.9 ** state["count"])
        p.sub_(size * (mean + 0.1 * (grad - state["before"])) / (square.sqrt() + 0.1))
        state["before"] = grad


class Remembering(Own):
    """The last gradient, itself: where gradients are zeroed in their memory, it is always this
    one."""

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        before = state.get("before")
        state["before"] = grad
        p.add_(grad if before is None else grad + 0.5 * before, alpha=-group["lr"])

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


class Noting(Own):
    """A count of all steps, which the state of each parameter and a dict by names have, too."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.steps = 0

    def begin(self, group: Any) -> None:
        self.steps += 1
        whole = self.state["whole"]
        whole["seen"] = whole.get("seen", 0) + 1

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if not state:
            state["start"] = self.steps
        state["last"] = self.steps
        p.sub_(grad * group["lr"] / (self.steps + state["start"] + self.state["whole"]["seen"]))


class OnItself(Own):
    """A count and a table of its own, in attributes."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.count, self.rates = 0, [1.0, 0.5, 0.25]

    def begin(self, group: Any) -> None:
        self.count += 1

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        rate = self.rates[self.count % 3]
        p.add_(grad, alpha=-group["lr"] * rate / self.count)


class Estimating(Own):
    """Prodigy's habit (Mishchenko and Defazio 2023): the step size is a Python number in the group,
    from sums over all parameters that are taken as items."""

    options = {"d": 1e-2, "top": 0.0}

    def begin(self, group: Any) -> None:
        total = 0.0
        for p in group["params"]:
            if p.grad is not None:
                start = self.state[p].setdefault("start", p.detach().clone())
                total += (p.grad * (start - p)).sum().item()
        group["top"] += group["d"] * total
        group["d"] = max(group["d"], group["top"])

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        p.add_(grad, alpha=-group["lr"] * group["d"])


class Lookahead(Own):
    """Zhang et al. 2019, around another optimizer, whose groups and state it shows as its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        self.inner = torch.optim.SGD(params, lr=lr, momentum=0.9)
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self.state = self.inner.state
        self.count = 0
        self.slow: dict[Any, torch.Tensor] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.slow:
                    self.slow[p] = p.detach().clone()
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return loss


class Anchored(Own):
    """MADGRAD's habits (Defazio and Jelassi 2021): where each parameter began, which stays as it
    is, and entries of ``state`` that are no parameter's."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.state["count"] = 0

    def begin(self, group: Any) -> None:
        if "tensor" not in self.state:
            self.state["tensor"] = torch.zeros((), device=group["params"][0].device)
        self.state["count"] += 1
        self.state["tensor"].add_(1)

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if not state:
            state["start"] = p.detach().clone()
            state["copied"] = torch.empty_like(p)
            state["copied"].copy_(p)
        p.sub_(group["lr"] * grad / self.state["tensor"])
        p.lerp_(state["start"] + state["copied"], 0.1 / self.state["count"])


class OfTorch(Muon):
    """torch's Muon, which takes matrices alone."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__([p for p in params if p.ndim == 2], **options)


CLASSES: tuple[type[Optimizer], ...] = (
    *(Lion, Factored, Shampoo, Soap, Orthogonal, ScheduleFree, Counting, Items, FloatItems),
    *(Replacing, Remembering, Noting, OnItself, Estimating),
    *(Lookahead, Anchored, OfTorch, torch.optim.Adafactor),
)


@rows({cls.__name__: cls for cls in CLASSES})
def own(world: World, make: Callable[..., Any]) -> Program:
    """Eight calls, with other hyperparameters on the way."""
    model = mlp(world)
    optimizer = make(model.parameters(), lr=0.05)
    if isinstance(optimizer, ScheduleFree):
        optimizer.train()
    world.watch(model=model)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    for i in range(8):
        if i in (3, 5, 6):
            for group in optimizer.param_groups:
                world.change(group.update, lr=0.1 / i)
        yield step(world.batch(i))
    yield [{k: v for k, v in g.items() if type(v) in (int, float)} for g in optimizer.param_groups]


@row()
def schedule_free_between_modes(world: World) -> Program:
    """``eval()`` and ``train()`` of the optimizer between calls."""
    model = mlp(world)
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    world.watch(model=model)
    optimizer.train()

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, look = world.compile(function), world.compile(lambda x: model(x).detach())
    for i in range(5):
        yield step(world.batch(i))
        if i % 2:
            world.change(optimizer.eval)
            yield look(world.batch(i))
            world.change(optimizer.train)


@row()
def rates_are_numbers_of_the_trace(world: World) -> Program:
    """Another ``lr`` in each call is the same program, of an optimizer of one's own, too."""
    model = mlp(world)
    optimizer = Lion(model.parameters())
    world.watch(model=model)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    for i in range(6):
        yield step(world.batch(i))
        world.change(optimizer.param_groups[0].update, lr=0.1 / (i + 1), betas=(0.9 - 0.1 * i, 0.9))
    world.at_most(1, step)
    world.traced_at_most(2, step)


# Optimizers that count, and how many programs their first calls take: one that makes the state,
# one that finds it, and one for each way to decide by the count.
COUNTS = {Factored: 2, Counting: 2, OnItself: 3, Items: 2, FloatItems: 3, Replacing: 2}
COUNTS |= {Remembering: 2, Noting: 2}


@rows({cls.__name__: (cls, programs) for cls, programs in COUNTS.items()})
def counts_are_inputs(world: World, case: tuple[type[Own], int]) -> Program:
    """A count that an optimizer raises is no reason to trace again, wherever it is kept."""
    cls, programs = case
    optimizer, step = trainer(world, mlp(world), cls, lr=0.05)
    for i in range(12):
        if i == 7:
            world.change(optimizer.param_groups[0].update, lr=0.01)
        yield step(world.batch(i))
    world.at_most(programs, step)
    world.traced_at_most(programs + 1, step)
