"""Changes of modules: modes, attributes, members, hooks, parametrizations, pruning masks."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from tests.compilation.changes._table import Program, forward, mlp, row, rows, trainer
from tests.compilation.changes._world import World, numbers

MODEL: nn.Module | None = None


def noisy(world: World) -> nn.Sequential:
    """A model whose modes give very different numbers, none of them random."""
    return world.module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(1.0)))


class Holder:
    """A user's object that has a model and a method that uses it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).detach()


def of_a_global(world: World, model: nn.Module) -> Callable:
    global MODEL
    MODEL = model
    return lambda x: MODEL(x).detach()


def of_a_nested_function(world: World, model: nn.Module) -> Callable:
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).detach()

    return lambda x: evaluate(x)


PLACES: dict[str, Callable[[World, nn.Module], Callable]] = {
    "closure": lambda w, m: lambda x: m(x).detach(),
    "global": of_a_global,
    "list": lambda w, m: (lambda models: lambda x: models[0](x).detach())([m]),
    "dict": lambda w, m: (lambda models: lambda x: models["net"](x).detach())({"net": m}),
    "partial": lambda w, m: functools.partial(lambda net, x: net(x).detach(), m),
    "default": lambda w, m: lambda x, net=m: net(x).detach(),
    "attribute": lambda w, m: (lambda o: lambda x: o.net(x).detach())(SimpleNamespace(net=m)),
    "attribute_of_attribute": lambda w, m: (lambda o: lambda x: o.a.b[0](x).detach())(
        SimpleNamespace(a=SimpleNamespace(b=[m]))
    ),
    "bound_method": lambda w, m: Holder(m).step,
    "module_itself": lambda w, m: m,
    "lookup": lambda w, m: (lambda get: lambda x: get()(x).detach())(lambda: m),
    "nested_function": of_a_nested_function,
}


@rows(PLACES)
def eval_of_a_model_in(world: World, place: Callable) -> Program:
    model = noisy(world)
    world.watch(model=model)
    step = world.compile(place(world, model))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(model.eval)
    yield step(world.batch(1))
    world.change(model.train)
    yield step(world.batch(2))


@row()
def eval_of_an_argument(world: World) -> Program:
    model = noisy(world)
    world.watch(model=model)
    step = world.compile(lambda net, x: net(x).detach())
    yield step(model, world.batch(0))
    yield step(model, world.batch(0))
    world.change(model.eval)
    yield step(model, world.batch(0))


@row()
def eval_of_an_argument_in_a_list(world: World) -> Program:
    model = noisy(world)
    step = world.compile(lambda nets, x: nets[0](x).detach())
    yield step([model], world.batch(0))
    yield step([model], world.batch(0))
    world.change(model.eval)
    yield step([model], world.batch(0))


@rows({"dropout": 2, "batch_norm": 1})
def eval_of_one_submodule(world: World, index: int) -> Program:
    model = noisy(world)
    model[2].p = 0.0 if index == 1 else 1.0
    world.watch(model=model)
    step = forward(world, nn.Sequential(nn.Identity(), model))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(model[index].eval)
    yield step(world.batch(0))


@row()
def training_set_by_hand(world: World) -> Program:
    model = noisy(world)
    step = forward(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(setattr, model[2], "training", False)
    yield step(world.batch(0))


@row()
def eval_of_a_module_that_only_reads_its_mode(world: World) -> Program:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if self.training else x

    model = Scaled()
    step = world.compile(lambda x: model(x))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(model.eval)
    yield step(world.batch(0))


@row()
def mode_read_by_the_step(world: World) -> Program:
    """The step asks for the mode itself; no forward of that module runs."""
    model = nn.Identity()
    step = world.compile(lambda x: x * 2 if model.training else x)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(model.eval)
    yield step(world.batch(0))


@row()
def train_and_eval_in_turns(world: World) -> Program:
    model = noisy(world)
    model[2].p = 0.0
    _, step = trainer(world, model)
    for i in range(4):
        world.change(model.train, i % 2 == 0)
        yield step(world.batch(i))
    world.at_most(2, step)


def own(world: World) -> nn.Module:
    """A module with attributes of every kind."""

    class Own(nn.Module):
        shared = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)
            self.scale, self.times, self.kind, self.flag, self.bias = 2.0, 1, "tanh", True, None
            self.options = SimpleNamespace(gain=2.0, inner=SimpleNamespace(offset=1.0))
            self.factors, self.table = [1.0, 2.0], {"by": 2.0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x) * self.scale
            for _ in range(self.times):
                x = getattr(torch, self.kind)(x)
            if self.flag:
                x = x * 3
            if self.bias is not None:
                x = x + self.bias
            x = x * self.options.gain + self.options.inner.offset
            for factor in self.factors:
                x = x * factor
            return x * self.table["by"] * self.shared

    return world.module(Own())


ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "float": lambda m: setattr(m, "scale", 5.0),
    "int": lambda m: setattr(m, "times", 3),
    "str": lambda m: setattr(m, "kind", "sin"),
    "bool": lambda m: setattr(m, "flag", False),
    "none": lambda m: setattr(m, "bias", 1.5),
    "of_attribute": lambda m: setattr(m.options, "gain", 5.0),
    "of_attribute_of_attribute": lambda m: setattr(m.options.inner, "offset", 5.0),
    "object": lambda m: setattr(m, "options", SimpleNamespace(gain=4.0, inner=m.options.inner)),
    "list_item": lambda m: m.factors.__setitem__(0, 4.0),
    "list_append": lambda m: m.factors.append(4.0),
    "dict_item": lambda m: m.table.update(by=4.0),
    "class": lambda m: setattr(type(m), "shared", 4.0),
    "instance_over_class": lambda m: setattr(m, "shared", 4.0),
    "forward": lambda m: setattr(m, "forward", lambda x: m.linear(x)),
    "class_forward": lambda m: setattr(type(m), "forward", lambda self, x: self.linear(x)),
    "module_class": lambda m: setattr(m, "__class__", type("Other", (type(m),), {"shared": 7.0})),
}


@rows(ATTRIBUTES)
def attribute(world: World, change: Callable) -> Program:
    model = own(world)
    step = forward(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change, model)
    yield step(world.batch(0))


def layer_norm(world: World) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    nn.init.ones_(model[1].bias)
    return world.module(model)


TORCH_ATTRIBUTES: dict[str, tuple[Callable, Callable]] = {
    "dropout_p": (noisy, lambda m: setattr(m[2], "p", 0.0)),
    "batch_norm_momentum": (noisy, lambda m: setattr(m[1], "momentum", 0.9)),
    "batch_norm_cumulative": (noisy, lambda m: setattr(m[1], "momentum", None)),
    "batch_norm_eps": (noisy, lambda m: setattr(m[1], "eps", 10.0)),
    "batch_norm_track": (noisy, lambda m: setattr(m[1], "track_running_stats", False)),
    "layer_norm_eps": (layer_norm, lambda m: setattr(m[1], "eps", 10.0)),
    "layer_norm_bias": (layer_norm, lambda m: setattr(m[1], "bias", None)),
    "leaky_relu_slope": (
        lambda w: nn.Sequential(nn.LeakyReLU(0.01)),
        lambda m: setattr(m[0], "negative_slope", 0.9),
    ),
    "functional": (
        lambda w: w.module(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)),
        lambda m: setattr(m, "activation", torch.tanh),
    ),
}


@rows(TORCH_ATTRIBUTES)
def attribute_of_torch_module(world: World, case: tuple[Callable, Callable]) -> Program:
    make, change = case
    model = make(world)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and change is not TORCH_ATTRIBUTES["dropout_p"][1]:
            module.p = 0.0
    world.watch(model=model)
    step = forward(world, model)
    statistics = lambda: [b.clone() for b in model.buffers()]
    yield step(world.batch(0)), statistics()
    yield step(world.batch(0)), statistics()
    world.change(change, model)
    yield step(world.batch(0)), statistics()


Change = Callable[[World, nn.Sequential], Any]


def new_weight(world: World) -> nn.Parameter:
    return world.parameter(numbers(7, 8, 6))


def tensor_for_parameter(world: World, model: nn.Sequential) -> None:
    del model[0].bias
    model[0].bias = world.tensor(torch.ones(8), None)


MEMBERS: dict[str, Change] = {
    "parameter": lambda w, m: setattr(m[0], "weight", new_weight(w)),
    "parameter_to_none": lambda w, m: setattr(m[0], "bias", None),
    "parameter_by_register": lambda w, m: m[0].register_parameter("weight", new_weight(w)),
    "parameter_in_dict": lambda w, m: m[0]._parameters.update(weight=new_weight(w)),
    "parameter_for_a_tensor": tensor_for_parameter,
    "submodule": lambda w, m: m.__setitem__(1, nn.ReLU()),
    "submodule_by_setattr": lambda w, m: setattr(m, "1", nn.ReLU()),
    "submodule_with_parameters": lambda w, m: m.__setitem__(0, w.module(nn.Linear(6, 8))),
    "submodule_in_dict": lambda w, m: m._modules.update({"1": nn.ReLU()}),
    "submodule_appended": lambda w, m: m.append(nn.Tanh()),
    "submodule_inserted": lambda w, m: m.insert(0, nn.Tanh()),
    "submodule_deleted": lambda w, m: m.__delitem__(1),
    "submodules_swapped": lambda w, m: m._modules.update({"1": m[2], "2": m[1]}),
    "submodules_in_another_order": lambda w, m: m._modules.update({"1": m._modules.pop("1")}),
}


@rows(MEMBERS)
def member(world: World, change: Change) -> Program:
    model = world.module(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Softmax(-1)))
    world.watch(model=model)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    step = world.compile(step)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change, world, model)
    yield step(world.batch(0))


@row()
def parameter_tied_between_calls(world: World) -> Program:
    model = world.module(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    world.watch(model=model)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    step = world.compile(step)
    yield step(world.batch(0)), model[0].weight.grad
    yield step(world.batch(0)), model[0].weight.grad
    world.change(setattr, model[2], "weight", model[0].weight)
    yield step(world.batch(0)), model[0].weight.grad


class Counted(nn.Module):
    """Scales by a buffer."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.register_buffer("scale", world.tensor(torch.full((6,), 2.0), None))
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        return x if self.mask is None else x * self.mask


def sixes(world: World, value: float) -> torch.Tensor:
    return world.tensor(torch.full((6,), value), None)


BUFFERS: dict[str, Callable[[World, Counted], Any]] = {
    "replaced": lambda w, m: setattr(m, "scale", sixes(w, 5.0)),
    "replaced_in_dict": lambda w, m: m._buffers.update(scale=sixes(w, 5.0)),
    "registered_again": lambda w, m: m.register_buffer("scale", sixes(w, 5.0), persistent=False),
    "in_place": lambda w, m: m.scale.fill_(5.0),
    "none_to_tensor": lambda w, m: setattr(m, "mask", sixes(w, 5.0)),
    "to_a_parameter": lambda w, m: (
        delattr(m, "scale"),
        setattr(m, "scale", nn.Parameter(sixes(w, 5.0))),
    ),
}


@rows(BUFFERS)
def buffer(world: World, change: Callable[[World, Counted], Any]) -> Program:
    model = Counted(world)
    world.watch(model=model)
    step = forward(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change, world, model)
    yield step(world.batch(0))


class Stack(nn.Module):
    """Layers in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6)])
        self.heads = nn.ModuleDict({"a": nn.Tanh()})
        self.scales = nn.ParameterList([torch.ones(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for head in self.heads.values():
            x = head(x)
        for scale in self.scales:
            x = x * scale
        return x


CONTAINERS: dict[str, Callable[[World, Stack], Any]] = {
    "list_append": lambda w, m: m.layers.append(w.module(nn.Linear(6, 6))),
    "list_replace": lambda w, m: m.layers.__setitem__(0, w.module(nn.Linear(6, 6))),
    "list_pop": lambda w, m: m.layers.pop(0),
    "dict_add": lambda w, m: m.heads.update({"b": nn.Softmax(-1)}),
    "dict_replace": lambda w, m: m.heads.update({"a": nn.Softmax(-1)}),
    "parameter_list_append": lambda w, m: m.scales.append(nn.Parameter(sixes(w, 3.0))),
}


@rows(CONTAINERS)
def container(world: World, change: Callable[[World, Stack], Any]) -> Program:
    model = world.module(Stack())
    world.watch(model=model)
    step = forward(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change, world, model)
    yield step(world.batch(0))


ORDERED: dict[str, nn.Module] = {
    "modules": nn.ModuleDict({"a": nn.Tanh(), "b": nn.Softplus(), "c": nn.Sigmoid()}),
    "parameters": nn.ParameterDict({"a": torch.ones(6), "b": torch.ones(6) * 2}),
}


@rows(ORDERED)
def dict_in_another_order(world: World, ordered: nn.Module) -> Program:
    table: Any = copy.deepcopy(ordered).to(world.device)

    def function(x: torch.Tensor) -> torch.Tensor:
        for value in table.values():
            x = value(x) if isinstance(value, nn.Module) else x * value + 1
        return x.detach()

    step = world.compile(function)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(lambda: table.update({"a": table.pop("a")}))
    yield step(world.batch(0))


def double(module: nn.Module, *values: Any) -> Any:
    """As a hook of any kind that may replace what it is given last."""
    value = values[-1]
    return tuple(v * 2 for v in value) if isinstance(value, tuple) else value * 2


HOOKS: dict[str, str] = {
    "forward": "register_forward_hook",
    "forward_pre": "register_forward_pre_hook",
    "full_backward": "register_full_backward_hook",
    "full_backward_pre": "register_full_backward_pre_hook",
}


def scale_gradients(module: nn.Module, gradients: tuple, *outputs: Any) -> tuple:
    return tuple(g if g is None else g * 2 for g in gradients)


def hook_of(kind: str) -> Callable:
    return scale_gradients if "backward" in kind else double


def gradients(world: World) -> tuple[nn.Sequential, Callable]:
    """A model, and a compiled step that returns its output and the first weight's gradient."""
    model = mlp(world)
    world.watch(model=model)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        out = model(x)
        out.pow(2).sum().backward()
        return out.detach(), model[0].weight.grad

    return model, world.compile(step)


@rows(HOOKS)
def hook_added(world: World, register: str) -> Program:
    model, step = gradients(world)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(getattr(model[2], register), hook_of(register))
    yield step(world.batch(0))


@rows(HOOKS)
def hook_removed(world: World, register: str) -> Program:
    model, step = gradients(world)
    handle = getattr(model[2], register)(hook_of(register))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(handle.remove)
    yield step(world.batch(0))


@row()
def hooks_cleared(world: World) -> Program:
    model, step = gradients(world)
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(model[0]._forward_hooks.clear)
    yield step(world.batch(0))


@row()
def hook_replaced(world: World) -> Program:
    model, step = gradients(world)
    key = model[0].register_forward_hook(lambda module, inputs, output: output * 2).id
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(model[0]._forward_hooks.update, {key: lambda m, i, output: output * 3})
    yield step(world.batch(0))


@row()
def hook_that_reads_a_number(world: World) -> Program:
    model, step = gradients(world)
    gain = 2.0
    model[0].register_forward_hook(lambda module, inputs, output: output * gain)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        gain = 3.0
    yield step(world.batch(0))


@rows(
    {
        "forward": nn.modules.module.register_module_forward_hook,
        "forward_pre": nn.modules.module.register_module_forward_pre_hook,
        "full_backward": nn.modules.module.register_module_full_backward_hook,
        "full_backward_pre": nn.modules.module.register_module_full_backward_pre_hook,
    }
)
def global_hook_added_and_removed(world: World, register: Callable) -> Program:
    _, step = gradients(world)
    yield step(world.batch(0).requires_grad_())
    yield step(world.batch(0).requires_grad_())
    handle = world.change(register, hook_of(register.__name__))
    try:
        results = step(world.batch(0).requires_grad_())
    finally:
        world.change(lambda: handle.remove())
    yield results
    yield step(world.batch(0).requires_grad_())


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


class Scale(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.by


def square(world: World) -> nn.Module:
    return world.module(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))


@row()
def parametrization_registered(world: World) -> Program:
    model = square(world)
    _, step = trainer(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(parametrize.register_parametrization, model[0], "weight", Symmetric())
    yield step(world.batch(0))
    yield step(world.batch(0))


@rows({"keep": True, "restore": False})
def parametrization_removed(world: World, leave: bool) -> Program:
    model = square(world)
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    _, step = trainer(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(parametrize.remove_parametrizations, model[0], "weight", leave_parametrized=leave)
    yield step(world.batch(0)), step(world.batch(0)), model[0].weight
    yield step(world.batch(1)), model[0].weight


@row()
def parametrization_attribute(world: World) -> Program:
    model = square(world)
    parametrize.register_parametrization(model[0], "weight", Scale(2.0))
    step = forward(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(setattr, model[0].parametrizations.weight[0], "by", 3.0)
    yield step(world.batch(0))


@row()
def parametrization_added_to_another(world: World) -> Program:
    model = square(world)
    parametrize.register_parametrization(model[0], "weight", Scale(2.0))
    step = forward(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(parametrize.register_parametrization, model[0], "weight", Symmetric())
    yield step(world.batch(0))


@row()
def weight_norm_added(world: World) -> Program:
    model = square(world)
    step = forward(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        parametrizations.weight_norm(model[0])
        model[0].parametrizations.weight.original0.data.mul_(3.0)
    yield step(world.batch(0))
    yield step(world.batch(1))


@row()
def parametrization_cached(world: World) -> Program:
    model = square(world)
    parametrize.register_parametrization(model[0], "weight", Scale(0.5))
    step = world.compile(lambda x: (model(x) + model(x * 2)).detach())
    with parametrize.cached():
        results = [step(world.batch(0)), step(world.batch(1))]
    yield results
    world.change(model[0].parametrizations.weight.original.data.mul_, 2.0)
    yield step(world.batch(0))


def prune_first(world: World, model: nn.Sequential) -> None:
    mask = torch.ones(8, 6)
    mask[:, ::2] = 0.0
    prune.custom_from_mask(model[0], "weight", world.tensor(mask, None))


PRUNING: dict[str, tuple[bool, Change]] = {
    "added": (False, prune_first),
    "removed": (True, lambda w, m: prune.remove(m[0], "weight")),
    "mask_in_place": (True, lambda w, m: m[0].weight_mask.zero_()),
    "mask_replaced": (True, lambda w, m: setattr(m[0], "weight_mask", m[0].weight_mask * 0)),
    "pruned_again": (True, lambda w, m: prune.identity(m[0], "bias") and m[0].bias_mask.zero_()),
    "original_changed": (True, lambda w, m: m[0].weight_orig.data.mul_(3.0)),
}


@rows(PRUNING)
def pruning(world: World, case: tuple[bool, Change]) -> Program:
    before, change = case
    model = mlp(world)
    if before:
        prune_first(world, model)
    _, step = trainer(world, model)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change, world, model)
    yield step(world.batch(0))
    yield step(world.batch(0)), model[0].weight.detach()


@row()
def model_deep_copied_between_calls(world: World) -> Program:
    """The copy is a model of its own; the step goes on with the first."""
    model = mlp(world)
    _, step = trainer(world, model)
    yield step(world.batch(0))
    twin = copy.deepcopy(model)
    world.watch(twin=[p.detach() for p in twin.parameters()])
    if world.changes:
        with torch.no_grad():
            twin[0].weight.zero_()
            model[2].bias.fill_(2.0)
    yield step(world.batch(1))
    yield step(world.batch(2))


@rows({"bfloat16": torch.bfloat16, "float64": torch.float64})
def model_of_another_dtype(world: World, dtype: torch.dtype) -> Program:
    model = mlp(world)
    step = world.compile(lambda x: model(x.to(model[0].weight.dtype)).detach().float() * 0 + 1)
    reads = world.compile(lambda: model[0].weight.detach() * 1)
    yield step(world.batch(0)), reads()
    yield step(world.batch(0)), reads()
    world.change(model.to, dtype)
    yield step(world.batch(0)), reads()


@row()
def requires_grad_of_a_module(world: World) -> Program:
    model = mlp(world)
    _, step = trainer(world, model)
    yield step(world.batch(0)), model[0].weight.detach().clone()
    yield step(world.batch(0)), model[0].weight.detach().clone()
    world.change(model[0].requires_grad_, False)
    yield step(world.batch(1)), model[0].weight.detach().clone()
    yield step(world.batch(2)), model[0].weight.detach().clone()
    world.change(model[0].requires_grad_, True)
    yield step(world.batch(3)), model[0].weight.detach().clone()


@row()
def checkpointing_switched(world: World) -> Program:
    """A user's flag that changes how, and not what, is computed."""
    from torch.utils.checkpoint import checkpoint

    model = own(world)
    model.recompute = False

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        out = checkpoint(model, x, use_reentrant=False) if model.recompute else model(x) * 2
        out.pow(2).sum().backward()
        return out.detach(), model.linear.weight.grad

    step = world.compile(step)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(setattr, model, "recompute", True)
    yield step(world.batch(0))


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean_with_buffers": {"use_buffers": True},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema_with_buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "ema_one_by_one": {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True},
    "of_the_user": {"avg_fn": lambda average, new, n: average + (new - average) / (n + 2)},
}


@rows(AVERAGES, unseen=True)
def averaged_in_the_step(world: World, options: dict) -> Program:
    """``AveragedModel`` counts in a CPU tensor, and copies in the first call."""
    model = world.module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    average = AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.watch(model=model, average=average)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss.detach()

    step = world.compile(function)
    for i in range(5):
        yield step(world.batch(i)), int(average.n_averaged)
    world.traced_at_most(2, step)


@row()
def cumulative_norm(world: World) -> Program:
    model = world.module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None)))
    world.watch(model=model)
    step = world.compile(lambda x: model(x).sum(1).detach())
    for i in range(4):
        yield step(world.batch(i)), [b.clone() for b in model.buffers()]
    world.traced_at_most(1, step)
    world.change(model[1].reset_running_stats)
    for i in range(2):
        yield step(world.batch(i)), [b.clone() for b in model.buffers()]


def pop_and_append(model: nn.Sequential) -> None:
    model.pop(-1)
    model.append(nn.Tanh())


def names_exchanged(model: nn.Sequential) -> None:
    table = dict(model._modules)
    model._modules.clear()
    model._modules.update(zip(reversed(table), table.values(), strict=True))


# What gives a module other dicts than it had, or the names in them to others.
TABLES: dict[str, list[Callable[[nn.Sequential], Any]]] = {
    "submodules_replaced": [
        lambda m: m.append(nn.ReLU()),
        lambda m: m.pop(-1),  # the dict that was there at first is as it was, and no longer m's
        lambda m: m.append(nn.Sigmoid()),
    ],
    "popped_and_appended": [pop_and_append, pop_and_append, lambda m: m.append(nn.Sigmoid())],
    "restored": [lambda m: m.__setstate__(nn.Sequential(nn.ReLU()).__dict__)],
    "names_exchanged": [names_exchanged],
    "hooks_replaced": [
        lambda m: setattr(m, "_forward_hooks", OrderedDict()),
        lambda m: m.register_forward_hook(lambda module, args, out: out * 2),
    ],
}


@rows(TABLES)
def tables_of_a_module(world: World, changes: list[Callable]) -> Program:
    class Halves(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in sorted(self._modules):
                x = self._modules[name](x)
            return x

    model = Halves(nn.Hardtanh(-0.5, 0.5), nn.Softshrink(0.2))
    model.register_forward_hook(lambda module, args, out: out + 1)
    step = world.compile(lambda x: model(x))
    yield step(world.batch(0))
    for change in changes:
        world.change(change, model)
        yield step(world.batch(0))


@rows({"forward": "register_forward_hook", "before_it": "register_forward_pre_hook"})
def a_hook_registered_again_with_keywords(world: World, register: str) -> Program:
    model = mlp(world)

    def hook(*given: Any) -> Any:
        last = given[-1] if "pre" not in register else given[1][0]
        scaled = last * len(given)
        return scaled if "pre" not in register else ((scaled,), {}) if given[2:] else (scaled,)

    handle = getattr(model[1], register)(hook)
    step, x = forward(world, model), world.batch(0)
    yield step(x)
    handle.remove()
    handle = getattr(model[1], register)(hook, with_kwargs=world.changes)
    yield step(x)


@rows({"hook": 0, "not_saved": 1})
def what_state_dict_gives(world: World, not_saved: int) -> Program:
    model, scale = mlp(world), [1.0]
    buffer = model[0].bias.detach().clone()
    model.register_buffer("extra", buffer)

    def doubled(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state.update({name: value * scale[0] for name, value in state.items()})

    x = world.batch(0)
    step = world.compile(lambda x: x * sum(v.sum() for v in model.state_dict().values()))
    yield step(x)
    if not_saved:
        model.register_buffer("extra", buffer, persistent=not world.changes)
        yield step(x)
        return
    model[0].register_state_dict_post_hook(doubled)
    yield step(x)
    scale[0] = 3.0 if world.changes else 1.0
    yield step(x)


@rows({"buffer": "buffer", "parameter": "parameter", "module": "module"})
def registration_hook_of_all_modules(world: World, kind: str) -> Program:
    """What the step puts into a module goes through hooks that the user registers for all."""
    module, register = (
        nn.Module(),
        getattr(torch_modules, f"register_module_{kind}_registration_hook"),
    )
    seen = SimpleNamespace(factor=2.0)
    world.watch(seen=seen)

    def step(x: torch.Tensor) -> torch.Tensor:
        if kind == "buffer":
            module.register_buffer("last", x.detach())
        elif kind == "parameter":
            module.register_parameter("last", None)
            module.weight = nn.Parameter(x.detach())
        else:
            nn.Module().child = nn.Identity()
        return x * seen.factor

    step, x = world.compile(step), world.batch()
    yield step(x)
    handle = world.change(register, lambda *_: setattr(seen, "factor", 5.0))
    try:
        yield step(x)
        yield step(x)
    finally:
        if handle is not None:
            handle.remove()


@row()
def spectral_norm_of_before(world: World) -> Program:
    """torch's old function: ``weight`` begins as another tensor of ``weight_orig``'s memory."""
    linear = nn.Linear(6, 8)
    with torch.no_grad():
        linear.weight.copy_(numbers(0, 8, 6))
        linear.bias.zero_()
    model = world.module(linear)
    nn.utils.spectral_norm(model)
    with torch.no_grad():
        model.weight_u.copy_(torch.ones(8) / 8**0.5)
        model.weight_v.copy_(torch.ones(6) / 6**0.5)
    optimizer = torch.optim.SGD([model.weight_orig], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(step)
    for seed in range(3):
        yield step(world.batch(seed)), model.weight_orig, model.weight_u
        world.change(optimizer.param_groups[0].update, lr=0.01)
