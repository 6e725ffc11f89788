"""Classes of the user's that are derived from torch's and Python's, and what only the code of
those reads of them; objects of the user's where a library keeps its own.

Each maker gives a function and a change, and the function computes something else after it.
"""

from __future__ import annotations

import abc
import builtins
import collections.abc
import contextlib
import contextvars
import ctypes
import datetime
import decimal
import functools
import multiprocessing
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.optim.swa_utils import AveragedModel

from tests.compilation.changes._table import Program, row, rows
from tests.compilation.changes._world import World

Case = tuple[Callable[..., Any], Callable[[], Any]]
Maker = Callable[[World], Case]


class Gain:
    """In front of a class of torch's."""

    gain = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * self.gain


def derived(base: type, *given: Any, **changed: Any) -> Maker:
    """An object of a class that says nothing of its own; attributes that only torch's code reads
    are changed."""

    def make(world: World) -> Case:
        module = world.module(type("Derived", (base,), {"__module__": __name__})(*given))
        change = lambda: [setattr(module, name, value) for name, value in changed.items()]
        return (lambda x: module(x).detach()), change

    return make


def mixed_in(world: World) -> Case:
    class Layer(Gain, nn.Softplus):
        pass

    layer = Layer()
    return (lambda x: layer(x)), lambda: setattr(layer, "beta", 4)


def class_attribute(world: World) -> Case:
    class Act(nn.LeakyReLU):
        pass

    act = Act(0.1)
    del act.negative_slope
    Act.negative_slope = 0.1
    return (lambda x: act(x)), lambda: setattr(Act, "negative_slope", 0.9)


def helper_put_in(world: World) -> Case:
    class Norm(nn.BatchNorm1d):
        pass

    norm = Norm(6, affine=False, track_running_stats=False)

    def check(self: Norm, x: torch.Tensor) -> None:
        self.eps = 2.0

    return (lambda x: norm(x)), lambda: setattr(Norm, "_check_input_dim", check)


def helper_reads_a_global(world: World) -> Case:
    config = {"gain": 1.0}

    class Conv(nn.Conv1d):
        def _conv_forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
            return super()._conv_forward(x, *given) * config["gain"]

    conv = world.module(Conv(1, 1, 3))
    return (lambda x: conv(x[:, None]).detach()), lambda: config.update(gain=3.0)


def behind_another_model(world: World) -> Case:
    class Loss(nn.MSELoss):
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    net, loss = world.module(Net()), Loss()
    return (lambda x: loss(net(x), x).detach()), lambda: setattr(loss, "reduction", "sum")


def averaged_by(world: World) -> Case:
    class Average(AveragedModel):
        pass

    model = world.module(nn.Linear(6, 4))
    average = Average(model, avg_fn=lambda old, new, count: 0.5 * old + 0.5 * new)
    average.n_averaged.fill_(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        average.update_parameters(model)
        return average(x).detach()

    return step, lambda: setattr(average, "avg_fn", lambda old, new, count: new * 3)


def no_momentum(world: World) -> Case:
    """The average over all batches, whatever class it is."""

    class Norm(nn.modules.batchnorm._BatchNorm):
        def _check_input_dim(self, x: torch.Tensor) -> None:
            pass

    norm = world.module(Norm(6, affine=False))

    def step(x: torch.Tensor) -> torch.Tensor:
        norm(x)
        return norm.running_mean.clone()

    return step, lambda: setattr(norm, "momentum", None)


INHERITED: dict[str, Maker] = {
    "eps": derived(nn.LayerNorm, 6, eps=2.0),
    "slope": derived(nn.LeakyReLU, 0.1, negative_slope=0.9),
    "p": derived(nn.Dropout, 1.0, p=0.0),
    "approximate": derived(nn.GELU, approximate="tanh"),
    "dim": derived(nn.Softmax, 1, dim=0),
    "bounds": derived(nn.Hardtanh, max_val=0.1, min_val=-0.1),
    "window": derived(nn.MaxPool1d, 2, kernel_size=3, stride=1),
    **{
        make.__name__: make
        for make in (
            mixed_in,
            class_attribute,
            helper_put_in,
            helper_reads_a_global,
            behind_another_model,
            averaged_by,
            no_momentum,
        )
    },
}


@rows(INHERITED)
def inherited(world: World, make: Maker) -> Program:
    yield from _changed(world, make)


def module_list(world: World) -> Case:
    layers = nn.ModuleList()

    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return function, lambda: layers.append(nn.Tanh())


def module_dict(world: World) -> Case:
    adapters = nn.ModuleDict()
    inner = nn.Tanh()
    function = lambda x: adapters["a"](x) if "a" in adapters else -x
    return function, lambda: adapters.update({"a": inner})


def truth_of_a_sequence(world: World) -> Case:
    heads = nn.Sequential()
    return (lambda x: x * 2 if heads else x), lambda: heads.append(nn.Tanh())


def parameters_by_hand(world: World) -> Case:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for parameter in self._parameters.values():
                x = x * parameter
            return x.detach()

    net = Net()
    value = world.parameter(torch.full((6,), 2.0), None)
    return (lambda x: net(x)), lambda: net.register_parameter("scale", value)


def text_of_one(world: World) -> Case:
    net = nn.Module()
    return (lambda x: x * len(str(net))), lambda: net.add_module("inner", nn.Tanh())


EMPTY = (module_list, module_dict, truth_of_a_sequence, parameters_by_hand, text_of_one)


@rows({make.__name__: make for make in EMPTY})
def empty(world: World, make: Maker) -> Program:
    yield from _changed(world, make)


class Warm(StepLR):
    rate = 2.0

    def step(self) -> None:  # type: ignore[override]
        super().step()

    def factor(self) -> float:
        return self.rate


class Still(Warm):
    def step(self) -> None:  # type: ignore[override]
        pass


def _schedule(world: World, cls: type = Warm, *given: Any) -> LRScheduler:
    optimizer = torch.optim.SGD([world.parameter(torch.ones(4, 6))], lr=0.1)
    return cls(optimizer, *(given or (1, 0.5)))


@rows(
    {
        "of_its_class": lambda schedule, cls: setattr(cls, "step", lambda self: None),
        "class_of_it": lambda schedule, cls: setattr(schedule, "__class__", Still),
        "of_torch": lambda schedule, cls: setattr(cls, "step", Still.step),
    }
)
def scheduler_stepped(world: World, change: Callable[[Any, type], Any]) -> Program:
    """What steps it is what its class has then."""
    cls = type("Own", (Warm,), {"__module__": __name__})
    schedule = _schedule(world, cls)
    optimizer = schedule.optimizer
    parameter = optimizer.param_groups[0]["params"][0]
    world.watch(optimizer=optimizer)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (x * parameter).sum().backward()
        optimizer.step()
        schedule.step()

    run, x = world.compile(step), world.batch()
    for number in range(4):
        if number == 2:
            world.change(change, schedule, cls)
        run(x)
        yield optimizer.param_groups[0]["lr"], schedule.last_epoch
    world.traced_at_most(3, run)


def attribute_of_a_scheduler_s_class(world: World) -> Case:
    cls = type("Own", (Warm,), {"__module__": __name__})
    schedule = _schedule(world, cls)
    return (lambda x: x * schedule.factor()), lambda: setattr(cls, "rate", 5.0)


def method_of_a_scheduler(world: World) -> Case:
    cls = type("Own", (Warm,), {"__module__": __name__})
    schedule = _schedule(world, cls)
    return (lambda x: x * schedule.factor()), lambda: setattr(cls, "factor", lambda self: 5.0)


def what_a_closed_form_reads(world: World) -> Case:
    schedule = _schedule(world, StepLR)
    function = lambda x: x * schedule._get_closed_form_lr()[0]
    return function, lambda: schedule.base_lrs.__setitem__(0, 3.0)


def property_with_a_factor(world: World) -> Case:
    class Scaled(property):
        factor = 2.0

        def __get__(self, owner: Any, cls: type | None = None) -> Any:
            return self.fget(owner) * self.factor

    class Config:
        @Scaled
        def rate(self) -> float:
            return 3.0

    config = Config()
    return (lambda x: x * config.rate), lambda: setattr(Scaled, "factor", 5.0)


def python_module(world: World) -> Case:
    class Lazy(types.ModuleType):
        def get(self) -> float:
            return self.rate

    module = Lazy("lazy")
    module.rate = 2.0
    return (lambda x: x * module.get()), lambda: setattr(Lazy, "get", lambda self: 9.0)


def python_module_changes_its_class(world: World) -> Case:
    class Lazy(types.ModuleType):
        @property
        def rate(self) -> float:
            return 5.0

    module = types.ModuleType("lazy")
    vars(module)["rate"] = 2.0
    return (lambda x: x * module.rate), lambda: setattr(module, "__class__", Lazy)


def iterator_with_a_method(world: World) -> Case:
    class Source(map):
        rate = 2.0

        def get(self) -> float:
            return self.rate

    source = Source(abs, [])
    return (lambda x: x * source.get()), lambda: setattr(Source, "rate", 5.0)


def _mask(world: World) -> tuple[type, torch.Tensor]:
    class Mask(torch.Tensor):
        inverted = False

        def factor(self) -> float:
            return 3.0 if self.inverted else 2.0

    return Mask, torch.ones(2).as_subclass(Mask)


def flag_of_a_tensor_s_class(world: World) -> Case:
    cls, mask = _mask(world)
    return (lambda x: x * mask.factor()), lambda: setattr(cls, "inverted", True)


def flag_of_a_tensor_alone(world: World) -> Case:
    _, mask = _mask(world)
    return (lambda x: x * mask.factor()), lambda: setattr(mask, "inverted", True)


def method_of_a_tensor(world: World) -> Case:
    cls, mask = _mask(world)
    return (lambda x: x * mask.factor()), lambda: setattr(cls, "factor", lambda self: 9.0)


def date(world: World) -> Case:
    class Day(datetime.date):
        pass

    held = [Day(2024, 1, 2)]
    return (lambda x: x * held[0].day), lambda: held.__setitem__(0, Day(2024, 1, 3))


def decimal_number(world: World) -> Case:
    class Money(decimal.Decimal):
        pass

    held = [Money("1.5")]
    return (lambda x: x * float(held[0])), lambda: held.__setitem__(0, Money("2.5"))


def number_of_an_error(world: World) -> Case:
    class Failed(OSError):
        pass

    failed = Failed(2, "no such file")
    return (lambda x: x * failed.errno), lambda: setattr(failed, "errno", 3)


OF_PYTHON: tuple[Maker, ...] = (
    attribute_of_a_scheduler_s_class,
    method_of_a_scheduler,
    what_a_closed_form_reads,
    property_with_a_factor,
    python_module,
    python_module_changes_its_class,
    iterator_with_a_method,
    flag_of_a_tensor_s_class,
    flag_of_a_tensor_alone,
    method_of_a_tensor,
    date,
    decimal_number,
    number_of_an_error,
)


@rows({make.__name__: make for make in OF_PYTHON})
def own_class(world: World, make: Maker) -> Program:
    yield from _changed(world, make)


@row()
def class_of_an_argument(world: World) -> Program:
    cls, mask = _mask(world)
    step = world.compile(lambda x, mask: x * mask.factor())
    yield step(world.batch(), mask)
    world.change(setattr, cls, "inverted", True)
    yield step(world.batch(), mask)


@contextlib.contextmanager
def _put(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is missing else setattr(owner, name, before)


class Scaled:
    def __init__(self) -> None:
        self.rate = 2.0

    def __call__(self, x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        return x.relu() * self.rate


def _scaled_by(owner: Any, x: torch.Tensor, config: Any) -> torch.Tensor:
    return x * config.rate


PLACES: dict[str, tuple[Any, str, Callable[[Scaled], Any], Callable[[Any], Any]]] = {
    "in_torch": (torch, "own_config", lambda s: s, lambda x: x * torch.own_config.rate),
    "in_builtins": (builtins, "own_config", lambda s: s, lambda x: x * own_config.rate),  # noqa: F821
    "in_sys": (sys, "own_config", lambda s: s, lambda x: x * sys.own_config.rate),
    "on_tensors": (torch.Tensor, "own", lambda s: s, lambda x: x * x.own.rate),
    "behind_relu": (F, "relu", lambda s: s, nn.ReLU()),
    "wrapped": (F, "relu", lambda s: functools.wraps(F.relu)(lambda x, inplace: s(x)), nn.ReLU()),
    "bound": (nn, "own_relu", lambda s: s.__call__, lambda x: nn.own_relu(x)),
    "partial": (
        *(F, "own", lambda s: functools.partial(_scaled_by, None, config=s)),
        lambda x: F.own(x),
    ),
    "method": (
        *(nn.Tanh, "forward", lambda s: functools.partialmethod(_scaled_by, config=s)),
        nn.Tanh(),
    ),
}


@rows(PLACES)
def put_into_a_library(world: World, place: Any) -> Program:
    owner, name, around, function = place
    scaled = Scaled()
    with _put(owner, name, around(scaled)):
        yield from _changed(
            world, lambda world: ((lambda x: function(x)), lambda: setattr(scaled, "rate", 5.0))
        )


def methodcaller_s_list(world: World) -> Case:
    dims = [0]
    call = operator.methodcaller("sum", dims)
    return (lambda x: call(x)), lambda: dims.append(1)


def default_of_a_variable(world: World) -> Case:
    scaled = Scaled()
    variable = contextvars.ContextVar("variable", default=scaled)
    return (lambda x: x * variable.get().rate), lambda: setattr(scaled, "rate", 3.0)


def shared_number(world: World) -> Case:
    epoch = multiprocessing.Value("i", 2)
    return (lambda x: x * epoch.value), lambda: setattr(epoch, "value", 3)


def registered_with_python_s(world: World) -> Case:
    class Batch:
        pass

    batch = Batch()
    function = lambda x: x * 2 if isinstance(batch, collections.abc.Sequence) else x * 3
    return function, lambda: collections.abc.Sequence.register(Batch)


def no_longer_abstract(world: World) -> Case:
    class Model(abc.ABC):
        @abc.abstractmethod
        def scale(self) -> float: ...

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            Model()
        except TypeError:
            return x * 2
        return x * 3

    def change() -> None:
        Model.scale = lambda self: 2.0
        abc.update_abstractmethods(Model)

    return function, change


HELD = (
    methodcaller_s_list,
    default_of_a_variable,
    shared_number,
    registered_with_python_s,
    no_longer_abstract,
)


@rows({make.__name__: make for make in HELD})
def held(world: World, make: Maker) -> Program:
    yield from _changed(world, make)


@rows(
    {
        "slice": (slice, lambda holder: holder.stop),
        "methodcaller": (
            *(lambda t: operator.methodcaller("mul", t),),
            lambda holder: holder(torch.ones((), device="cpu")),
        ),
        "py_object": (ctypes.py_object, lambda holder: holder.value),
    }
)
def tensor_is_also_an_argument(world: World, case: Any) -> Program:
    """At first the argument is the tensor that the step finds in there."""
    hold, get = case
    tensor = world.tensor(torch.full((4, 6), 2.0))
    holder = hold(tensor)
    step = world.compile(lambda x: x + get(holder))
    yield step(tensor)
    yield step(world.batch(1) if world.changes else tensor)
    world.change(tensor.fill_, 5.0)
    yield step(world.batch(2) if world.changes else tensor)


@row()
def scheduler_in_a_steady_loop(world: World) -> Program:
    """Its own step changes what it counts in every call: no call is traced for that."""
    schedule = _schedule(world, Warm)
    optimizer = schedule.optimizer
    parameter = optimizer.param_groups[0]["params"][0]
    world.watch(optimizer=optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x * parameter).square().sum() * schedule.factor()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    run = world.compile(step)
    for number in range(5):
        if number == 3:
            world.change(setattr, schedule, "rate", 3.0)
        yield run(world.batch())
    world.traced_at_most(2, run)


def _changed(world: World, make: Maker) -> Program:
    function, change = make(world)
    step = world.compile(function)
    yield step(world.batch())
    yield step(world.batch())
    world.change(change)
    yield step(world.batch())
    yield step(world.batch(1))
    world.traced_at_most(3, step)
