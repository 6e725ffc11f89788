"""Chooses the layouts of a step's values, one mesh axis after the other (`solving/`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xla_dtensor.layouts.axis import AxisToChoose, Barred
from xla_dtensor.layouts.choice import Choice, Unit, units_of
from xla_dtensor.layouts.graph import Graph
from xla_dtensor.layouts.memory import Alive, Point
from xla_dtensor.layouts.parts import DimAxes, dim_axes
from xla_dtensor.layouts.prices import BY_BYTES, COMPILED_FOR_GPUS, COMPILED_FOR_TPUS, Prices
from xla_dtensor.layouts.solving.integer_program import AxisChoice
from xla_dtensor.mesh import Frame
from xla_dtensor.mesh.domains import slow_axes

ROUNDS = 2
"""How often each axis is chosen anew, with the others as they are by then."""

ORDERED = 3
"""Of how many axes all orders are tried; of more the mesh's, and that backwards."""

EXCHANGED = 8
"""In how many groups of state, the largest, axes may change places: each try takes a second."""

POINTS = 3
"""At how many points of a program memory is seen to: without one place the next may be too full."""


def choose_for(
    jaxpr: Any,
    inputs: Sequence[Any],
    results: Sequence[Any],
    arguments: Sequence[bool],
    frame: Frame,
    memory: float | None = None,
) -> Choice:
    """The layouts of a program on a frame's devices.

    Args:
        jaxpr: of constants.
        inputs: the shardings of these.
        results: those of its results; None where that is open.
        arguments: which inputs are arguments of the step.
        frame: the devices.
        memory: bytes of one of them that the program may take.
    """
    elsewhere: list[Any] = []

    def axes(variable: Any, sharding: Any) -> DimAxes | None:
        if getattr(sharding, "mesh", None) == frame.jax_mesh:
            return dim_axes(sharding, len(variable.aval.shape), frame.sizes)
        if sharding is not None and not sharding.is_fully_replicated:
            elsewhere.append(variable)
        return None

    known = {v: axes(v, sharding) for v, sharding in zip(jaxpr.constvars, inputs, strict=True)}
    required = [axes(v, sharding) for v, sharding in zip(jaxpr.outvars, results, strict=True)]
    given = [v for v, is_argument in zip(jaxpr.constvars, arguments, strict=True) if is_argument]
    devices = frame.jax_mesh.devices
    by_platform = {"gpu": COMPILED_FOR_GPUS, "tpu": COMPILED_FOR_TPUS}
    prices = by_platform.get(devices.flat[0].platform, BY_BYTES)
    own = jaxpr, known, required, frame.sizes, given, elsewhere
    return next(choices(*own, [memory], prices, slow=slow_axes(devices, frame.sizes)))


def choices(
    jaxpr: Any,
    known: Mapping[Any, DimAxes | None],
    required: Sequence[DimAxes | None],
    sizes: Mapping[str, int],
    arguments: Sequence[Any] = (),
    elsewhere: Sequence[Any] = (),
    memories: Sequence[float | None] = (None,),
    prices: Prices = BY_BYTES,
    sought: Sequence[Sequence[Any]] | None = None,
    slow: Mapping[str, int] = {},
    adds: bool = False,
) -> Iterator[Choice]:
    """The layouts of a jaxpr, for each of several sizes of memory, when they are asked for.

    Args:
        jaxpr: without inputs: those are constants.
        known: how constants lie.
        required: how results have to lie; None where that is open.
        sizes: the number of devices along each mesh axis, in the mesh's order.
        arguments: which constants are the step's arguments. What takes long is cut along the axes
            that cut these, always: who cuts a batch doesn't want each device to compute all of it,
            to move less.
        elsewhere: constants and results that lie on another mesh of the same devices.
        memories: bytes of a device that the program may take, if layouts can see to that; None if
            nobody knows how many it has.
        prices: what collectives cost.
        sought: constants of which it is asked how they should lie (`xla_dtensor.tune`), in rows of
            those that are to lie alike; every axis is to be used then.
        slow: axes that leave a slice or a host, and how many of their devices are in one.
        adds: whether XLA adds products before it sums what devices have of each (`mark_added`).
    """
    graph = Graph(jaxpr, known, required, sizes, elsewhere, sought, adds)
    batches = {
        axis
        for layout in graph.layouts_of([v for v in arguments if known.get(v) is not None])
        for names in layout
        for axis in names
    }
    given = [axes for axes in (*known.values(), *required) if axes is not None]
    given += [group.known for group in graph.groups() if group.known is not None]
    used = {axis for axes in given for names in axes for axis in names}
    units = units_of({axis: size for axis, size in sizes.items() if size > 1}, given)
    if sought is not None:  # parameters may use any axis, and each axis by itself
        used, units = {*sizes}, [(axis,) for axis, size in sizes.items() if size > 1]
        graph.keep({*jaxpr.constvars}.difference(arguments))
    chooser = _Chooser(graph, sizes, given, units, batches, used, prices, slow)
    chooser.begin()
    chooser.turn_back()
    chooser.exchange()
    unbound, alive = chooser.choice, None
    for memory in memories:
        found = unbound
        if memory is not None:
            alive = alive or Alive(jaxpr, graph)
            found = chooser.fit(unbound, memory, alive)
        found.by_clock = chooser.by_clock
        yield found


class _Chooser:
    """Chooses how each axis cuts a graph, with the others as they are by then.

    Args:
        graph: what is to be laid out.
        sizes: the number of devices along each mesh axis, in the mesh's order.
        given: the layouts that are known.
        units: the axes, those joined that are one to the step.
        batches: the axes that cut the step's arguments.
        used: those that it is worth something to use.
        prices: what collectives cost.
        slow: axes that leave a slice or a host, and how many of their devices are in one.
    """

    def __init__(
        self,
        graph: Graph,
        sizes: Mapping[str, int],
        given: Sequence[DimAxes],
        units: Sequence[Unit],
        batches: set[str],
        used: set[str],
        prices: Prices,
        slow: Mapping[str, int],
    ) -> None:
        self._graph, self._batches, self._prices, self._slow = graph, batches, prices, slow
        self._sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self._units = tuple(units)
        # Pairs of axes that shard one dim together in one of the given layouts.
        self._together = {
            pair for axes in given for names in axes for pair in itertools.permutations(names, 2)
        }
        self._used = used
        self._points: list[Point] = []
        self._barred: Barred = {}
        self.by_clock = False
        self.choice = self._nothing()

    def _nothing(self) -> Choice:
        return Choice(
            *(self._graph, self._sizes, self._units, self._used),
            *(self._slow, self._prices),
        )

    def fit(self, unbound: Choice, memory: float, alive: Alive) -> Choice:
        """Choose anew, for points at which there is too much, until there is none.

        Args:
            unbound: what is chosen if there is enough; it stays as it is.
            memory: bytes of a device.
            alive: what is there at once.
        """
        self.choice, self._points = unbound.copy(), []
        while True:
            needed, groups = alive.most(self.choice.share)
            self.choice.too_many = too_many = max(needed - memory, 0.0)
            if not self.choice.found or not too_many or len(self._points) == POINTS:
                return self.choice
            if not groups or any(groups == before for _, before in self._points):
                return self.choice
            here = sum(nbytes * self.choice.share(group) for group, nbytes in groups.items())
            self._points.append((memory - (needed - here), groups))
            self.settle()

    def begin(self) -> None:
        """Choose from the cheapest of `_starts` on, with more than two axes from two of them: which
        ends best isn't always the first."""
        found = []
        for start, last in self._starts()[: 2 if len(self._units) > 2 else 1]:
            self.choice = start
            self.settle(last)
            found.append(self.choice)
        self.choice = min(found, key=Choice.price)

    def _starts(self) -> list[tuple[Choice, Unit]]:
        """How each axis cuts, chosen once, and which was the last; the cheapest first, each once.

        What comes first is chosen as if all others cut inputs and results alone, and may take a dim
        that a later one needed more ("dp" the experts, before "ep"), so three are taken in all
        orders. Where it is asked how state lies, the batch's axes also leave it whole at first, and
        have what is left.
        """
        units = self._units
        found: dict[float, tuple[Choice, Unit]] = {}  # by price: most orders give the same
        every = itertools.permutations(units) if len(units) <= ORDERED else (units, units[::-1])
        ways: list[tuple[Unit, ...]] = [*every]
        batches = [unit for unit in units if unit[0] in self._batches]
        if any(group.kept for group in self._graph.groups()):
            ways.append((*batches, *(u for u in units if u not in batches), *batches))
        begun: dict[tuple[tuple[Unit, bool], ...], Choice] = {(): self._nothing()}
        for way in ways:
            steps = tuple((unit, unit in way[i + 1 :]) for i, unit in enumerate(way))
            for i, (unit, leaves_state) in enumerate(steps):
                if steps[: i + 1] not in begun:
                    self.choice = begun[steps[:i]].copy()
                    self.choice.found = self.choice.found and self._choose(unit, leaves_state)
                    begun[steps[: i + 1]] = self.choice
            found.setdefault(begun[steps].price(), (begun[steps], way[-1] if way else ()))
        return [found[price] for price in sorted(found)]

    def settle(self, fresh: Unit | None = None) -> None:
        """Choose anew how axes cut, but for one that was chosen just now, as long as that is
        cheaper: an axis is chosen by what it costs with the others as they are, and that is nearly,
        but not quite, the price of all of them."""
        stale = {*self._units} - {fresh}  # units whose choice was made before the others changed
        price = self.choice.price()
        for unit in [*self._units] * ROUNDS:
            if unit in stale and self.choice.found:
                stale.discard(unit)
                before, self.choice = self.choice, self.choice.copy()
                self.choice.found = self._choose(unit)
                new = self.choice.price()
                # A choice that saves memory is kept though it costs more: prices lack memory.
                if new < price or (self._points and before.states != self.choice.states):
                    price, stale = new, {*self._units} - {unit}
                else:
                    self.choice = before

    def turn_back(self) -> None:
        """Choose anew where values go to other dims along two axes, if that is cheaper.

        An axis that is chosen first may cut an operation as the other then cuts all around it, so
        that this one has to cut it as the first cuts all around: neither alone can leave that.
        """
        start, kind_of = self.choice, self._graph.folds.kind_of_node
        found, turned = [(start.price(), self._barred, start)], start.turned()
        for unit in (u for u in self._units if any(u in units for units in turned.values())):
            at = [number for number, units in turned.items() if unit in units]
            self._barred = {(kind_of[number], unit): start.factors[number][unit] for number in at}
            self.choice = start.copy()
            for each in (unit, *(other for other in self._units if other != unit)):
                self.choice.found = self.choice.found and self._choose(each)
            self.settle()
            found.append((self.choice.price(), self._barred, self.choice))
        _, self._barred, self.choice = min(found, key=lambda each: each[0])

    def exchange(self) -> None:
        """Let two axes change places where they cut state, if that is cheaper: neither alone can,
        as the other is where it would have to go."""
        state = [group for group in self._graph.groups() if group.kept and group.known is None]
        for group in sorted(state, key=lambda group: -group.kept)[:EXCHANGED]:
            for one, other in itertools.combinations(self._units, 2):
                before = self.choice
                states = {**before.states.get(group, {})}
                here, there = states.get(one), states.get(other)
                if here is None or there is None or here == there:
                    continue
                sizes = {here: before.size(other), there: before.size(one)}
                if any(group.shape[dim] % size for dim, size in sizes.items()):
                    continue
                self.choice = before.copy()
                self.choice.states[group] = {**states, one: there, other: here}
                self.settle()
                if self.choice.price() >= before.price():
                    self.choice = before

    def _choose(self, unit: Unit, leaves_state: bool = False) -> bool:
        """Choose how a unit cuts; whether there is a way."""
        axis = AxisToChoose(
            *(self.choice, unit, self._together, self._barred),
            always=unit[0] in self._batches,
            leaves_state=leaves_state,
        )
        found = AxisChoice(self._graph, axis, self._points)
        self.by_clock |= found.by_clock
        if found.found:
            self.choice.cut(unit, found)
        return found.found
