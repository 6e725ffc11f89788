"""State that a step keeps outside of itself and replaces, and results that it leaves there.

Each row also says how often the step's Python may run: a steady call runs none of it.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from tests.compilation.changes._table import Program, mlp, row, rows, trainer
from tests.compilation.changes._world import World, numbers

HIDDEN: torch.Tensor | None = None
Pair = namedtuple("Pair", "h c")


@row()
def hidden_state(world: World) -> Program:
    """Reset by the user to nothing, and to a tensor; the old tensors keep their values."""
    weight = world.parameter(numbers(1, 4, 6))
    holder = SimpleNamespace(h=world.batch(9))

    def function(x: torch.Tensor) -> torch.Tensor:
        h = x if holder.h is None else torch.tanh(holder.h * weight + x)
        holder.h = h.detach()
        return h.detach() * 2

    step = world.compile(function)
    old = []
    for i in range(4):
        old.append(holder.h)
        yield step(world.batch(i)), holder, list(old)
    world.traced_at_most(2, step)  # the second: it lies as the weight does
    world.change(setattr, holder, "h", None)
    for i in range(3):
        yield step(world.batch(i)), holder
    world.change(setattr, holder, "h", world.batch(8))
    for i in range(3):
        yield step(world.batch(i)), holder
    world.traced_at_most(4, step)


@row()
def state_of_a_cell(world: World) -> Program:
    """An LSTM that is trained with truncated backpropagation: made by the first call, a tuple."""
    cell = world.module(nn.LSTMCell(6, 5))
    optimizer = SGD(cell.parameters(), lr=0.1)
    world.watch(cell=cell)
    holder = SimpleNamespace(state=None)

    def function(x: torch.Tensor) -> torch.Tensor:
        if holder.state is None:
            holder.state = (torch.zeros(4, 5, device=x.device), torch.zeros(4, 5, device=x.device))
        h, c = cell(x, holder.state)
        loss = h.pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        holder.state = (h.detach(), c.detach())
        return loss.detach()

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), holder
    world.traced_at_most(2, step)
    world.change(setattr, holder, "state", None)
    for i in range(3):
        yield step(world.batch(i)), holder
    world.traced_at_most(2, step)


@row(unseen=True)
def result_is_the_state(world: World) -> Program:
    """The user holds what was there, and what is returned; both are the same tensor."""
    holder = SimpleNamespace(h=world.batch(9))

    def function(x: torch.Tensor) -> torch.Tensor:
        holder.h = torch.tanh(holder.h + x)
        return holder.h

    step = world.compile(function)
    kept = [holder.h]
    for i in range(4):
        out = step(world.batch(i))
        kept.append(out)
        yield out is holder.h, list(kept)
    world.traced_at_most(1, step)


@row(unseen=True)
def written_and_replaced(world: World) -> Program:
    """The tensor that was there is overwritten, too."""
    holder = SimpleNamespace(h=world.batch(9))

    def function(x: torch.Tensor) -> torch.Tensor:
        holder.h.mul_(0.5)
        holder.h = holder.h + x
        return holder.h * 2

    step = world.compile(function)
    kept = []
    for i in range(4):
        kept.append(holder.h)
        yield step(world.batch(i)), holder, list(kept)
    world.traced_at_most(1, step)


@row()
def state_is_a_tensor_from_elsewhere(world: World) -> Program:
    first = world.batch(9)
    holder, other = SimpleNamespace(h=first), SimpleNamespace(first=first)

    def function(x: torch.Tensor) -> torch.Tensor:
        holder.h = holder.h * 0.5 + x + other.first
        return holder.h * 2

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), holder
    world.change(setattr, holder, "h", first)
    yield step(world.batch(3)), holder
    world.change(setattr, other, "first", holder.h)
    for i in range(3):
        yield step(world.batch(i)), holder, other


@row()
def state_is_the_argument(world: World) -> Program:
    holder = SimpleNamespace(h=world.batch(9))

    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        holder.h = holder.h * 0.5 + x
        return holder.h * 2

    step = world.compile(function)
    for i in range(6):
        x = holder.h if i > 2 and world.changes else world.batch(i)
        yield step(x), x, holder
    world.traced_at_most(2, step)


@row(unseen=True)
def states_change_places(world: World) -> Program:
    holder = SimpleNamespace(a=world.batch(10), b=world.batch(11))

    def function(x: torch.Tensor) -> torch.Tensor:
        holder.a, holder.b = holder.b, holder.a
        return holder.a * 2 + x

    step = world.compile(function)
    for i in range(5):
        yield step(world.batch(i)), holder
    world.traced_at_most(1, step)


@row(unseen=True)
def state_is_the_last_argument(world: World) -> Program:
    holder = SimpleNamespace(last=None)

    def function(x: torch.Tensor) -> torch.Tensor:
        out = x if holder.last is None else x - holder.last[0]
        holder.last = (x, x.t())
        return out * 2

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), holder
    world.traced_at_most(2, step)


@row()
def states_in_a_list(world: World) -> Program:
    states = [world.batch(9), world.batch(8)]

    def function(x: torch.Tensor) -> torch.Tensor:
        for i in range(2):
            states[i] = states[i] * 0.5 + x * i
        return states[0] + states[1]

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), states
    world.change(states.__setitem__, 0, world.batch(20))
    for i in range(2):
        yield step(world.batch(i)), states
    world.traced_at_most(1, step)


@row()
def list_of_states_replaced(world: World) -> Program:
    holder = SimpleNamespace(states=[world.batch(9), world.batch(8)])

    def function(x: torch.Tensor) -> torch.Tensor:
        holder.states = [state * 0.5 + x for state in holder.states]
        return holder.states[0] * 2

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), holder
    world.traced_at_most(1, step)
    world.change(holder.states.append, world.batch(20))
    for i in range(3):
        yield step(world.batch(i)), holder
    world.traced_at_most(2, step)


@row(unseen=True)
def list_of_states_written_and_replaced(world: World) -> Program:
    holder = SimpleNamespace(states=[world.batch(9), world.batch(8)])

    def function(x: torch.Tensor) -> torch.Tensor:
        holder.states[0] = holder.states[0] + x
        holder.states = [state * 0.5 + x for state in holder.states]
        return holder.states[0] * 2

    step = world.compile(function)
    for i in range(3):
        before = holder.states
        yield step(world.batch(i)), holder, before


@row(unseen=True)
def state_with_a_number(world: World) -> Program:
    holder = SimpleNamespace(state=Pair(world.batch(9), 0))

    def function(x: torch.Tensor) -> torch.Tensor:
        h, n = holder.state
        holder.state = Pair(h * 0.5 + x, n + 1)
        return holder.state.h * n

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), holder, type(holder.state).__name__
    world.traced_at_most(1, step)


@row()
def state_that_grows(world: World) -> Program:
    """Each length is traced once."""
    holder = SimpleNamespace(cache=None)

    def function(x: torch.Tensor) -> torch.Tensor:
        holder.cache = x if holder.cache is None else torch.cat([holder.cache, x], 0)
        return holder.cache.sum(0)

    step = world.compile(function)
    for _ in range(2):
        for i in range(3):
            yield step(world.batch(i)), holder
        world.change(setattr, holder, "cache", None)
    world.traced_at_most(3, step)


@row()
def holder_of_the_state_replaced(world: World) -> Program:
    """The same place of two objects, of which the step reaches one."""
    a, b = SimpleNamespace(h=world.batch(7)), SimpleNamespace(h=world.batch(8))
    outer = SimpleNamespace(holder=a)

    def function(x: torch.Tensor) -> torch.Tensor:
        outer.holder.h = outer.holder.h * 0.5 + x
        return outer.holder.h * 2

    step = world.compile(function)
    for i in range(8):
        world.change(setattr, outer, "holder", (a, b)[(i // 2) % 2])
        yield step(world.batch(i)), a, b
    world.traced_at_most(2, step)


@row(unseen=True)
def state_of_two_objects(world: World) -> Program:
    """A compiled method: each object has its own, in the instance and not in the class."""

    class Model:
        h = None
        count = 0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.h = x if self.h is None else self.h * 0.5 + x
            self.count += 1
            return self.h * self.count

    Model.step = world.compile(Model.step)  # type: ignore[method-assign]
    a, b = Model(), Model()
    for i in range(8):
        yield (a, b)[i % 2].step(world.batch(i)), a.h, b.h, a.count, b.count
    world.traced_at_most(4, Model.step)
    del a.h
    for i in range(3):
        yield a.step(world.batch(i)), a.h, a.count
    assert Model.h is None


@row(unseen=True)
def state_in_a_global(world: World) -> Program:
    global HIDDEN
    HIDDEN = world.batch(9)

    def function(x: torch.Tensor) -> torch.Tensor:
        global HIDDEN
        HIDDEN = HIDDEN * 0.5 + x  # type: ignore[operator]
        return HIDDEN * 2

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), HIDDEN
    world.traced_at_most(1, step)


@row()
def state_replaced_sometimes(world: World) -> Program:
    holder = SimpleNamespace(h=world.batch(9))

    def function(x: torch.Tensor, keep: bool) -> torch.Tensor:
        out = holder.h * 0.5 + x
        if keep:
            holder.h = out
        return out * 2

    step = world.compile(function)
    for i in range(6):
        yield step(world.batch(i), i % 3 != 0 if world.changes else True), holder
    world.traced_at_most(3, step)


@row(unseen=True)
def state_behind_a_gradient(world: World) -> Program:
    """The result has a history, which the state hasn't."""
    weight = world.parameter(numbers(1, 4, 6))
    world.watch(weight=weight)
    holder = SimpleNamespace(h=world.batch(5))

    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(holder.h * weight + x)
        holder.h = out.detach()
        return out

    step = world.compile(function)
    for i in range(4):
        weight.grad = None
        out = step(world.batch(i))
        out.sum().backward()
        yield out.detach(), holder
    world.traced_at_most(2, step)


@row(unseen=True)
def state_with_its_history(world: World) -> Program:
    """Without a backward pass torch goes on with it; it is refused here."""
    weight = world.parameter(numbers(1, 4, 6))
    holder = SimpleNamespace(h=world.batch(5))

    def function(x: torch.Tensor) -> torch.Tensor:
        holder.h = torch.tanh(holder.h * weight + x)
        return holder.h.detach() * 2

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), holder.h.requires_grad


@row(unseen=True)
def state_on_the_host(world: World) -> Program:
    holder = SimpleNamespace(count=torch.tensor(0.0))

    def function(x: torch.Tensor) -> torch.Tensor:
        holder.count = holder.count + 1
        return x * holder.count

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), holder
    world.traced_at_most(1, step)


COUNTERS: dict[str, Callable[[SimpleNamespace, torch.Tensor], torch.Tensor]] = {
    "computes": lambda s, x: x * s.count,
    "decides": lambda s, x: x * 10 if s.count % 2 == 0 else x,
    "compares": lambda s, x: x * 10 if s.count // 2 >= 2 else x,
    "formats": lambda s, x: x * float(f"{s.count}"),
    "indexes": lambda s, x: x[s.count % 3],
}


@rows(COUNTERS)
def counter(world: World, use: Callable) -> Program:
    state = SimpleNamespace(count=0)

    def function(x: torch.Tensor) -> torch.Tensor:
        state.count += 1
        return use(state, x) * 1

    step = world.compile(function)
    for i in range(7):
        yield step(world.batch(i)), state, type(state.count).__name__
    world.change(setattr, state, "count", 0)
    yield step(world.batch(1)), state


@row(unseen=True)
def counter_runs_no_python(world: World) -> Program:
    state = SimpleNamespace(count=0, average=0.0, flag=False)

    def function(x: torch.Tensor) -> torch.Tensor:
        state.count += 1
        state.average = 0.9 * state.average + 0.1 * state.count
        state.flag = not state.flag
        return x * state.average if state.flag else x

    step = world.compile(function)
    for i in range(8):
        yield step(world.batch(i)), state
    world.traced_at_most(3, step)


LEFT: dict[str, Callable[[SimpleNamespace, torch.Tensor, float], Any]] = {
    "in_a_dict": lambda s, x, n: s.logs.update(loss=x.sum()),
    "in_a_new_dict": lambda s, x, n: setattr(s, "logs", {"loss": x.sum(), "n": n}),
    "argument": lambda s, x, n: setattr(s, "last", x),
    "view_of_the_argument": lambda s, x, n: setattr(s, "last", [x.t(), 1]),
    "number": lambda s, x, n: setattr(s, "last", n * 2),
    "on_the_host": lambda s, x, n: setattr(s, "last", s.host + 1),
    "parameter": lambda s, x, n: setattr(s, "last", (s.weight, x * 2)),
}


@rows(LEFT, unseen=True)
def left(world: World, leave: Callable) -> Program:
    """What the step leaves is that of each call."""
    weight = world.parameter(numbers(1, 4, 6))
    state = SimpleNamespace(logs={}, last=None, host=torch.tensor(1.0), weight=weight)

    def function(x: torch.Tensor, n: float) -> torch.Tensor:
        leave(state, x, n)
        return x * n

    step = world.compile(function)
    for i in range(5):
        state.host.fill_(float(i))
        yield step(world.batch(i), 1.5 * i), state.logs, state.last
    world.traced_at_most(3, step)


@row()
def left_and_read(world: World) -> Program:
    """Whether there is something decides; what it is doesn't matter."""
    state = SimpleNamespace(last=None)

    def function(x: torch.Tensor) -> torch.Tensor:
        out = x * 2 if state.last is None else x * 3
        state.last = out
        return out

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), state
    world.change(setattr, state, "last", None)
    for i in range(3):
        yield step(world.batch(i)), state
    world.traced_at_most(2, step)


@row()
def list_made_in_every_call(world: World) -> Program:
    """What the user does to it isn't there in the next call."""
    state = SimpleNamespace(logs=None)

    def function(x: torch.Tensor) -> torch.Tensor:
        state.logs = []
        return x * 2

    step = world.compile(function)
    for i in range(4):
        step(world.batch(i))
        world.change(state.logs.append, i)
        yield state.logs


@row(unseen=True)
def step_that_raises(world: World) -> Program:
    """A call that fails while it is traced has changed nothing."""
    model = mlp(world)
    state = SimpleNamespace(h=world.batch(9), count=0)

    def function(x: torch.Tensor, bad: bool) -> torch.Tensor:
        state.h = state.h * 0.5 + x
        state.count += 1
        if bad:
            raise ValueError("as asked for")
        return model(state.h).detach()

    step = world.compile(function)
    for i in range(6):
        if i in (0, 3):
            world.fail(step, world.batch(i), True)
        yield step(world.batch(i), False), state


@dataclasses.dataclass
class Output:
    loss: Any
    parts: Any = None
    count: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: Any
    parts: Any = None
    count: int = 3


class Plain:
    def __init__(self, loss: Any, parts: Any) -> None:
        self.loss, self.parts, self.count = loss, [parts], Output(loss)


class Slotted:
    __slots__ = ("count", "loss", "parts")

    def __init__(self, loss: Any, parts: Any) -> None:
        self.loss, self.parts, self.count = loss, parts, 1


class Private:
    __slots__ = ("__loss", "count", "parts")

    def __init__(self, loss: Any, parts: Any) -> None:
        self.__loss, self.parts, self.count = loss, parts, 1

    @property
    def loss(self) -> Any:
        return self.__loss


RESULTS = {
    "dataclass": Output,
    "frozen": Frozen,
    "object": Plain,
    "slots": Slotted,
    "private_slots": Private,
}


@rows(RESULTS, unseen=True)
def result(world: World, make: Callable) -> Program:
    """A step that returns an object, with a history, and leaves another one."""
    weight = world.parameter(numbers(1, 4, 6))
    state = SimpleNamespace(last=None)

    def function(x: torch.Tensor) -> Any:
        state.last = make(x * 3, None)
        return make((x * weight).sum(), {"x": x * 2, "given": x})

    step = world.compile(function)
    kept = []
    for i in range(4):
        weight.grad = None
        out = step(world.batch(i))
        out.loss.backward()
        kept.append(out)
        parts = out.parts[0] if make is Plain else out.parts
        yield [o.loss.detach() for o in kept], parts, weight.grad, type(out).__name__
        yield state.last.loss, type(state.last).__name__
    world.traced_at_most(2, step)


@row(unseen=True)
def result_twice(world: World) -> Program:
    """One object in two places stays one, which costs a trace in every call."""

    def function(x: torch.Tensor) -> list[Output]:
        out = Output(x * 2)
        return [out, out]

    step = world.compile(function)
    for i in range(3):
        a, b = step(world.batch(i))
        yield a is b, a.loss


@row(unseen=True)
def result_from_outside(world: World) -> Program:
    """An object that is there before is the same in every call."""
    holder = SimpleNamespace(scale=2.0)

    def function(x: torch.Tensor) -> SimpleNamespace:
        holder.out = x * holder.scale
        return holder

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)) is holder, holder.out
    world.traced_at_most(2, step)


@row()
def state_in_a_dataclass(world: World) -> Program:
    holder = SimpleNamespace(state=Output(world.batch(5), world.batch(6)))

    def function(x: torch.Tensor) -> torch.Tensor:
        state = holder.state
        holder.state = Output(state.loss * 0.5 + x, state.parts + 1, state.count + 1)
        return holder.state.loss * holder.state.count

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), holder
    world.change(setattr, holder.state, "loss", world.batch(20))
    for i in range(2):
        yield step(world.batch(i)), holder
    world.traced_at_most(1, step)


@row(unseen=True)
def leaf_left(world: World) -> Program:
    """An adversarial example: it requires grad, and has one."""
    model = mlp(world)
    holder = SimpleNamespace(x=None)

    def function(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().clone().requires_grad_()
        model(leaf).pow(2).sum().backward()
        model.zero_grad()
        holder.x = leaf
        return leaf

    step = world.compile(function)
    for i in range(3):
        out = step(world.batch(i))
        yield out.detach(), out.grad, out.requires_grad, holder.x is out
    world.traced_at_most(1, step)


# --- objects of one kind that change places -------------------------------------------------------


class Cell:
    """Holds a tensor and a count."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h, self.n = h, 0


def _swap_attributes(cells: Any) -> None:
    cells.first, cells.second = cells.second, cells.first


def _swap_elements(cells: Any) -> None:
    cells[0], cells[1] = cells[1], cells[0]


PLACES: dict[str, tuple[Callable, Callable, Callable]] = {
    "attributes": (
        lambda a, b: SimpleNamespace(first=a, second=b),
        lambda cells: (cells.first, cells.second),
        _swap_attributes,
    ),
    "list": (lambda a, b: [a, b], lambda cells: tuple(cells), lambda cells: cells.reverse()),
    "elements": (lambda a, b: [a, b], lambda cells: tuple(cells), _swap_elements),
    "dict": (lambda a, b: {0: a, 1: b}, lambda cells: (cells[0], cells[1]), _swap_elements),
}


@rows(PLACES)
def cells_swapped(world: World, how: tuple[Callable, Callable, Callable]) -> Program:
    make, both, swap = how
    a, b = Cell(world.batch(5)), Cell(world.batch(6))
    cells = make(a, b)

    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = both(cells)
        first.h, second.h = first.h * 0.5 + x, second.h * 0.25 - x
        first.n += 1
        second.n += 10
        return first.h * first.n + second.n

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), a.h, b.h, a.n, b.n
    world.change(swap, cells)
    for i in range(2):
        yield step(world.batch(i)), a.h, b.h, a.n, b.n


@row()
def written_cells_swapped(world: World) -> Program:
    """Only written, not read."""
    cells = [SimpleNamespace(h=None), SimpleNamespace(h=None)]
    a, b = cells

    def function(x: torch.Tensor) -> torch.Tensor:
        for k, cell in enumerate(cells):
            cell.h = x * (k + 1)
        return x

    step = world.compile(function)
    yield step(world.batch(0)), a.h, b.h
    yield step(world.batch(1)), a.h, b.h
    world.change(cells.reverse)
    yield step(world.batch(2)), a.h, b.h


@row(unseen=True)
def counter_of_collections(world: World) -> Program:
    """Its update() adds."""
    counter = collections.Counter(n=1)

    def function(x: torch.Tensor) -> torch.Tensor:
        counter["n"] += 1
        return x * counter["n"]

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), counter["n"]


@row(unseen=True)
def large_ints(world: World) -> Program:
    """Of more than 64 bits, now and then."""
    state = SimpleNamespace(seed=12345)

    def function(x: torch.Tensor) -> torch.Tensor:
        state.seed = (state.seed * 6364136223846793005 + 1442695040888963407) % 2**64
        return x * (state.seed % 7)

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), str(state.seed)


@row(unseen=True)
def counter_asked_for_its_type(world: World) -> Program:
    state = SimpleNamespace(n=0.5)

    def function(x: torch.Tensor) -> torch.Tensor:
        state.n += 1.0
        return x * (3 if type(state.n) is float else 1)

    step = world.compile(function)
    for i in range(3):
        yield step(world.batch(i)), state.n


class Slotted:
    __slots__ = ("count", "h", "last")

    def __init__(self, h: torch.Tensor) -> None:
        self.h, self.count = h, 0


@row()
def state_in_slots(world: World) -> Program:
    """One of them isn't there at first, and is only assigned."""
    state = Slotted(world.batch(9))

    def function(x: torch.Tensor) -> torch.Tensor:
        state.h = torch.tanh(state.h + x).detach()
        state.count += 1
        state.last = state.h.sum()
        return state.h * state.count

    step = world.compile(function)
    for i in range(4):
        yield step(world.batch(i)), state.h, state.count, state.last
    world.change(setattr, state, "count", 0)
    world.change(setattr, state, "h", world.batch(8))
    for i in range(3):
        yield step(world.batch(i)), state.h, state.count, state.last
    world.traced_at_most(2, step)


@row()
def slot_that_appears(world: World) -> Program:
    state = Slotted(world.batch(9))

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * state.last if hasattr(state, "last") else x + state.h

    step = world.compile(function)
    yield step(world.batch(0)), step(world.batch(1))
    world.change(setattr, state, "last", 3.0)
    yield step(world.batch(0)), step(world.batch(1))
    if world.changes:
        del state.last
    yield step(world.batch(0)), step(world.batch(1))


@dataclasses.dataclass
class Recurrent:
    h: torch.Tensor
    count: int = 0


@rows({"namespace": SimpleNamespace, "dataclass": Recurrent})
def state_in_an_argument(world: World, make: Callable[..., Any]) -> Program:
    """Given to the step, which changes it."""
    state = make(h=world.batch(9), count=0)

    def function(state: Any, x: torch.Tensor) -> torch.Tensor:
        state.h = torch.tanh(state.h + x).detach()
        state.count += 1
        return state.h * state.count

    step = world.compile(function)
    for i in range(4):
        yield step(state, world.batch(i)), state.h, state.count
    world.change(setattr, state, "count", 0)
    for i in range(3):
        yield step(state, world.batch(i)), state.h, state.count
    other = make(h=world.batch(8), count=5)
    if world.changes:
        state, other = other, state
    for i in range(3):
        yield step(state, world.batch(i)), state.h, state.count, other.h, other.count
    world.at_most(2, step)


class OwnMomentum(torch.optim.Optimizer):
    """A user's optimizer, which puts new tensors in place of its state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                last = state.get("momentum", torch.zeros_like(p))
                state["momentum"] = 0.9 * last + p.grad
                p.add_(state["momentum"], alpha=-group["lr"])


@row(unseen=True)
def state_of_an_own_optimizer(world: World) -> Program:
    _, step = trainer(world, mlp(world), OwnMomentum)
    for i in range(5):
        yield step(world.batch(i))


class Features(nn.Module):
    """Keeps what it has computed on the way, for whoever is interested, and goes on with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.features: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = torch.tanh(self.first(x))
        return self.second(self.features)


@row(unseen=True)
def features_of_a_compiled_model(world: World) -> Program:
    """The loss is made outside, of the result and of what was kept; not in every call."""
    model = world.module(Features())
    step = world.compile(model)
    for i in range(6):
        out = step(world.batch(i))
        if i != 2:
            (out.square().mean() + model.features.mean()).backward()
        yield out, model.features, [p.grad for p in model.parameters()]
        if world.changes and i == 3:
            model.features = None
        if i == 4:
            model.zero_grad()
    world.traced_at_most(6, step)  # with gradients and without, with features and without


@row(unseen=True)
def activations_of_a_hook(world: World) -> Program:
    """Captured in a dict by a forward hook, in training."""
    model, seen = mlp(world), {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, x, out, name=name: seen.__setitem__(name, out))

    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    step = world.compile(function)
    for i in range(4):
        model.zero_grad()
        out = step(world.batch(i))
        (out.square().mean() + sum(a.abs().mean() for a in seen.values())).backward()
        yield out, dict(seen), [p.grad for p in model.parameters()]
    world.traced_at_most(3, step)


@row(unseen=True)
def features_of_the_last_call(world: World) -> Program:
    """Given back as they are: the very tensor, with its history."""
    model = world.module(Features())

    def function(x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        last = model.features
        return last, model(x)

    step = world.compile(function)
    before = None
    for i in range(5):
        last, out = step(world.batch(i))
        if last is not None:
            last.sum().backward()
        yield last is before, last, out, [p.grad for p in model.parameters()]
        before = model.features


@row(unseen=True)
def features_compared_with_those_before(world: World) -> Program:
    """Computed with: the backward pass goes on into the call before, or is refused."""
    model = world.module(Features())

    def function(x: torch.Tensor) -> torch.Tensor:
        last = model.features
        out = model(x)
        return out.sum() if last is None else out.sum() + (last - model.features).square().sum()

    step = world.compile(function)
    for i in range(4):
        model.zero_grad()
        loss = step(world.batch(i))
        loss.backward(retain_graph=True)
        yield loss, [p.grad for p in model.parameters()]


COUNT: contextvars.ContextVar[int] = contextvars.ContextVar("COUNT", default=0)
KEPT: contextvars.ContextVar[torch.Tensor] = contextvars.ContextVar("KEPT")


@rows({"count": "count", "tensor": "tensor", "reset": "reset"})
def context_variable(world: World, kind: str) -> Program:
    """A ``ContextVar`` that a step with an optimizer sets and reads."""
    model = mlp(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.watch(model=model)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        if kind == "tensor":
            kept = KEPT.get(None)
            KEPT.set(x if kept is None or not world.changes else kept * 0.5 + x)
            return KEPT.get().clone()
        token = COUNT.set(COUNT.get() + world.changes)
        count = COUNT.get()
        if kind == "reset":
            COUNT.reset(token)
        return x * (count + 1)

    step = world.compile(function)

    def calls() -> list[Any]:
        seen = []
        for i in range(6):
            if i == 4:
                world.change(COUNT.set, 10)
            seen.append([step(world.batch(i)), COUNT.get()])
        return seen

    # What is set there nobody else shall see.
    yield from contextvars.copy_context().run(calls)
