"""A jaxpr as a graph to be laid out: groups of values, and the nodes between them.

Values of which an elementwise equation makes another lie alike, or it would communicate: they are
one *group*, with one layout. So a residual stream is a group, through all layers, and a parameter
with its gradient and the state that an optimizer keeps. Every other equation is a *node*, which
takes values of some groups and gives values of others, and has ways of its own to be cut
(`factors.py`). What a node needs may differ from the layout of a value's group, at a price.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal, Var

from xla_dtensor.base import jax_private
from xla_dtensor.layouts.calls import CALLS, called, inlined
from xla_dtensor.layouts.factors import Factor, factors, is_elementwise, of_broadcast
from xla_dtensor.layouts.folding import fold
from xla_dtensor.layouts.marks import mark_added, mark_joint, pass_on
from xla_dtensor.layouts.parts import Body, DimAxes, Group, Node, dim_axes, nbytes_of, of_spec
from xla_dtensor.layouts.slices import cut_off_padding, is_cut_into
from xla_dtensor.layouts.work import work


class Graph:
    """The graph of a jaxpr.

    Args:
        jaxpr: without inputs: those are constants.
        known: how constants lie.
        required: how results have to lie; None where that is open.
        sizes: the number of devices along each mesh axis.
        elsewhere: constants and results that lie on another mesh of the same devices.
        sought: constants of which it is asked how they should lie, in rows of those that are to lie
            alike. Then the program's sharding constraints don't bind: they are those of how it lay
            when it was traced.
        adds: whether XLA adds products before it sums what devices have of each.

    Attributes:
        nodes: in order.
        folds: which of them are alike.
        bodies: of loops, by the identity of the equation.
        unknown: names of primitives that have no factors here; XLA lays them out.
    """

    def __init__(
        self,
        jaxpr: Any,
        known: Mapping[Any, DimAxes | None],
        required: Sequence[DimAxes | None],
        sizes: Mapping[str, int],
        elsewhere: Sequence[Any] = (),
        sought: Sequence[Sequence[Any]] | None = None,
        adds: bool = False,
    ) -> None:
        self._sizes, self._binds = sizes, sought is None
        self._times = 1
        self.nodes: list[Node] = []
        self.bodies: dict[int, Body] = {}
        self.unknown: set[str] = set()
        self._groups: dict[Any, Group] = {}
        self._same: dict[Any, Any] = {}
        self._by_rule: dict[Any, DimAxes] = {}  # a variable's layout by the last pin on it
        self._outermost: Any = None  # the outermost call around the present equations
        self._equations: list[Any] = []
        self._given: list[Any] = [*jaxpr.outvars]  # by loops' bodies, too
        for constant in jaxpr.constvars:
            self._group(constant, known.get(constant))
        for first, *others in sought or ():
            for other in others:
                self._join(None, other, first)
        self._leave(elsewhere)
        self._walk(jaxpr.eqns)
        for result, wanted in zip(jaxpr.outvars, required, strict=True):
            value = self._operand(result)
            if wanted is not None and value is not None:
                self._add(None, [value], [], required=wanted)
        self._leave(elsewhere)
        for group in self.groups():
            several = enumerate(group.known or ())
            group.orders |= {d: axes for d, axes in several if len(axes) > 1}
        pass_on(self.nodes, self.group)
        self._keep_to_rules()
        if adds:
            mark_added(self.nodes, self._equations, self._given, self.value)
        self.folds = fold(self.nodes, [*self.groups()], self.group)

    def value(self, variable: Any) -> Any:
        """The variable that has this one's value: inside of a call it is the caller's."""
        found = variable
        while found in self._same:
            found = self._same[found]
        if found is not variable:
            self._same[variable] = found  # a deep model's chains are long, and asked for often
        return found

    def group(self, variable: Any) -> Group | None:
        """The group of a variable's value; None of what has no dims or was never met, and of a
        number, as which JAX keeps a loss's own gradient."""
        if isinstance(variable, Literal):
            return None
        found = self._groups.get(self.value(variable))
        return None if found is None else found.whole

    def groups(self) -> Iterator[Group]:
        """All groups."""
        for group in self._groups.values():
            if group.within is None:
                yield group

    def is_left(self, node: Node) -> bool:
        """Whether XLA is to choose for a node, as it does for some of its operands or results."""
        groups = map(self.group, (*node.operands, *node.results))
        return any(group is not None and group.is_free for group in groups)

    def layouts_of(self, values: Iterable[Any]) -> Iterator[DimAxes]:
        """How values that are given lie, and how they are laid out as soon as they are given, as a
        model's hooks do with a batch that isn't sharded yet."""
        given = {id(group) for group in map(self.group, values) if group is not None}
        for node in self.nodes:
            if node.equation is None or node.equation.primitive.name != "sharding_constraint":
                continue
            operand, result = self.group(node.operands[0]), self.group(node.results[0])
            if id(operand) in given and result is not None and result.known is not None:
                yield result.known
        for group in self.groups():
            if id(group) in given and group.known is not None:
                yield group.known

    def keep(self, state: Iterable[Any]) -> None:
        """Note what a step reads and writes of its state, and of the gradients that change it."""
        for variable in state:
            if (group := self.group(variable)) is not None:
                group.kept += 2 * nbytes_of(variable.aval)
                group.kept_values += 1
        for node in self.nodes:
            for value in node.results:
                if (group := self.group(value)) is not None and group.kept:
                    group.kept += 2 * nbytes_of(value.aval) * node.times

    # --- making it ----------------------------------------------------------------------------

    def _group(self, variable: Any, known: DimAxes | None = None) -> None:
        aval = variable.aval
        shape = tuple(getattr(aval, "shape", ()))
        if math.prod(shape) and shape and variable not in self._groups:
            self._groups[variable] = Group(shape, nbytes_of(aval), known)

    def _leave(self, variables: Iterable[Any]) -> None:
        """Let XLA lay these out, and what lies as they do."""
        for group in map(self.group, variables):
            if group is not None and group.known is None:
                group.is_free = True

    def _add(
        self,
        equation: Any,
        operands: Sequence[Any],
        results: Sequence[Any],
        found: Sequence[Factor] = (),
        work: float = 0.0,
        required: DimAxes | None = None,
        fills: float = 0.0,
    ) -> None:
        node = Node(equation, operands, results, [*found], work, required, self._times, fills)
        self.nodes.append(node)

    def _operand(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return None
        variable = self.value(atom)
        return variable if variable in self._groups else None

    def _walk(self, equations: Iterable[Any]) -> None:
        for equation in equations:
            name = equation.primitive.name
            if name in CALLS:
                self._call(equation)
                continue
            if name == "for_each" and not _is_of_one_shape(equation):
                self._rows(equation)
                continue
            if name == "pin":
                self._pin(equation)
                continue
            for result in equation.outvars:
                self._group(result)
            self._equations.append(equation)
            if name == "scan":
                self._scan(equation)
            else:
                self._equation(equation)

    def _call(self, equation: Any) -> None:
        """As if the equations of the function that is called stood here."""
        before, self._outermost = self._outermost, self._outermost or equation
        self._inline(called(equation), equation.invars, equation.outvars)
        self._outermost = before

    def _pin(self, equation: Any) -> None:
        """How a rule would have a value lie: a way in which it may. The value is the same, so that
        what several operations want of it is moved once."""
        (operand,), (result,) = equation.invars, equation.outvars
        if isinstance(operand, Literal):
            self._group(result)
        else:
            self._same[result] = self.value(operand)
        group = self.group(result)
        if group is not None:
            wanted = dim_axes(equation.params["sharding"], len(group.shape), self._sizes)
            group.of_rule = group.of_rule or wanted
            if wanted is not None:
                self._by_rule[result] = wanted
            group.by_rule |= {(axis, d) for d, axes in enumerate(wanted or ()) for axis in axes}

    def _rows(self, equation: Any) -> None:
        """As if each row of a `for_each` were a call."""
        params, operands = equation.params, [*equation.invars]
        count, shared = params["count"], params["shared"]
        end = len(operands) - shared
        width, made = end // count, len(equation.outvars) // count
        for row in range(count):
            own = [*operands[row * width : (row + 1) * width], *operands[end:]]
            results = equation.outvars[row * made : (row + 1) * made]
            self._inline(params["jaxpr"].jaxpr, own, results)

    def _inline(self, inner: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        own = dict(zip(inner.invars, operands, strict=True))
        for constant in inner.constvars:
            own[constant] = Var(constant.aval)
            self._group(own[constant])
        _, made = self._inside(inner, own)
        for variable, atom in zip(results, made, strict=True):
            if isinstance(atom, Literal):
                self._group(variable)
            else:
                self._same[variable] = self.value(atom)

    def _inside(self, inner: Any, own: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
        """What `inlined` gives, after a walk through it."""
        return inlined(inner, own, lambda equation: self._walk([equation]))

    def _scan(self, equation: Any) -> None:
        """What a loop carries lies alike in each round, before and after. Of what it takes and
        gives slice by slice, a slice is cut as the whole is."""
        params, inner = equation.params, equation.params["jaxpr"].jaxpr
        consts, carried = jax_private.loop_parts(equation)
        own = {v: Var(v.aval) for v in (*inner.constvars, *inner.invars)}
        inputs = [own[v] for v in inner.invars]
        for i, (variable, atom) in enumerate(zip(inputs, equation.invars, strict=True)):
            if i < consts and not isinstance(atom, Literal):
                self._same[variable] = self.value(atom)
            else:
                self._group(variable)
        for variable in inner.constvars:
            self._group(own[variable])
        outside, self._times = self._times, self._times * max(params["length"], 1)
        operands = [*map(self._operand, equation.invars)]
        start = slice(consts, consts + carried)
        for variable, operand in zip(inputs[start], operands[start], strict=True):
            self._join(equation, variable, operand)
        for variable, operand in zip(inputs[start.stop :], operands[start.stop :], strict=True):
            self._slices(equation, operand, variable, (1, 0))
        equations, made = self._inside(inner, own)
        self._given += made
        values = [*map(self._operand, made)]
        for variable, value, result in zip(inputs[start], values, equation.outvars, strict=False):
            self._join(equation, value, variable)
            self._join(equation, result, variable)
        for value, result in zip(values[carried:], equation.outvars[carried:], strict=True):
            self._slices(equation, value, self._operand(result), (0, 1))
        self._times = outside
        constants = [own[v] for v in inner.constvars]
        self.bodies[id(equation)] = Body(equation, inputs, constants, equations, made)

    def _slices(self, equation: Any, operand: Any, result: Any, leading: tuple[int, int]) -> None:
        """One is made of slices of the other; which of them has a dim in front of a slice's. Slices
        of what has one dim are numbers, which have no layout."""
        if self.group(operand) is None or self.group(result) is None:
            return
        dims = range(min(len(operand.aval.shape), len(result.aval.shape)))
        same = [Factor({0: d + leading[0]}, {0: d + leading[1]}) for d in dims]
        stacks = leading[1] / max(equation.params["length"], 1)
        self._add(equation, [operand], [result], same, fills=stacks)

    def _equation(self, equation: Any) -> None:
        name = equation.primitive.name
        operands = [self._operand(atom) for atom in equation.invars]
        if name in ("optimization_barrier", "device_put"):  # to the host's memory and from there
            for operand, result in zip(operands, equation.outvars, strict=True):
                if operand is not None:
                    self._join(equation, operand, result)
        elif is_elementwise(equation):
            self._elementwise(equation, operands)
        elif name == "for_each":
            self._for_each(equation, operands)
        elif name == "sharding_constraint":
            self._constraint(equation, operands[0])
        elif name == "shard_map" and equation.params["mesh"].shape == self._sizes:
            self._by_hand(equation, operands)
        else:
            atoms = (*equation.invars, *equation.outvars)
            is_empty = any(0 in getattr(atom.aval, "shape", ()) for atom in atoms)
            found = [] if is_empty else factors(equation)
            source = self.group(operands[0]) if operands else None
            if found is None or is_cut_into(equation, source, self._sizes):
                # XLA chooses: no constraint on the results, and on operands only their rule's pin,
                # without which XLA may end the process (Fourier transforms).
                self.unknown |= {name} if found is None else set()
                for atom, operand in zip(equation.invars, operands, strict=True):
                    wanted = None if isinstance(atom, Literal) else self._by_rule.get(atom)
                    if wanted is not None and operand is not None:
                        outer = self._outermost or equation
                        self._add(outer, [operand], [], required=wanted)
                for result in equation.outvars:
                    group = self.group(result)
                    if group is not None:
                        group.is_free = True
                return
            results = [self._operand(result) for result in equation.outvars]
            fills = float(name == "scatter-add")
            self._add(equation, operands, results, found, work(equation), fills=fills)
            if name == "slice":
                cut_off_padding(self.nodes[-1], source, self.group(results[0]))
            elif name == "reshape":
                mark_joint(self.nodes[-1], self.group, self._sizes)

    def _elementwise(self, equation: Any, operands: Sequence[Any]) -> None:
        first, *others = equation.outvars
        for atom in equation.invars:
            if not isinstance(atom, Literal) and atom in self._by_rule:
                self._by_rule[first] = self._by_rule[atom]
        for other in others:
            self._join(equation, other, first)
        for operand in operands:
            if operand is not None:
                self._join(equation, operand, first)

    def _for_each(self, equation: Any, operands: Sequence[Any]) -> None:
        """Each row is elementwise: a parameter, its gradient, its state."""
        count, shared = equation.params["count"], equation.params["shared"]
        width, made = (len(operands) - shared) // count, len(equation.outvars) // count
        for row in range(count):
            members = [
                *operands[row * width : (row + 1) * width],
                *map(self._operand, equation.outvars[row * made : (row + 1) * made]),
            ]
            found = [member for member in members if member is not None]
            found.sort(key=lambda v: math.prod(v.aval.shape))
            for member in found[:-1]:
                if member.aval.shape == found[-1].aval.shape:
                    self._join(equation, member, found[-1])

    def _constraint(self, equation: Any, operand: Any) -> None:
        (result,) = equation.outvars
        group = self.group(result)
        if group is None or operand is None:
            return
        if not self._binds:
            self._same[result] = self.value(operand)
            return
        known = dim_axes(equation.params["sharding"], len(group.shape), self._sizes)
        if known is None:
            # A constraint on another mesh of the same devices, or on some dims alone.
            group.is_free = True
            return
        group.known = known
        whole = [Factor({0: d}, {0: d}) for d in range(len(group.shape))]
        self._add(equation, [operand], [result], whole)

    def _by_hand(self, equation: Any, operands: Sequence[Any]) -> None:
        """A function of shards says how they are cut."""
        params, sizes = equation.params, self._sizes
        for operand, spec in zip(operands, params["in_specs"], strict=True):
            if operand is not None:
                wanted = of_spec(spec, len(operand.aval.shape), sizes)
                assert wanted is not None
                self._add(equation, [operand], [], required=wanted)
        for result, spec in zip(equation.outvars, params["out_specs"], strict=True):
            group = self.group(result)
            if group is not None:
                group.known = of_spec(spec, len(group.shape), sizes)

    def _join(self, equation: Any, variable: Any, other: Any) -> None:
        """Let two values of one shape lie alike, unless both are known to lie otherwise; numbers
        don't lie anywhere."""
        one, two = self.group(variable), self.group(other)
        if one is None or two is None or one is two:
            return
        if len(one.shape) != len(two.shape):
            return
        if one.shape != two.shape:
            self._add(equation, [variable], [other], of_broadcast(one.shape, two.shape))
            return
        if one.known is not None and two.known is not None and one.known != two.known:
            # It moves before the operation: the other operand lies as the result does.
            self._add(equation, [variable], [], required=two.known)
            return
        one.within = two
        two.nbytes = max(one.nbytes, two.nbytes)
        two.known = one.known if two.known is None else two.known
        two.uneven |= one.uneven
        two.joint |= one.joint
        two.orders = one.orders | two.orders
        two.by_rule |= one.by_rule
        two.of_rule = two.of_rule or one.of_rule
        two.is_free |= one.is_free

    def _keep_to_rules(self) -> None:
        """What is made of values that XLA lays out lies as its operation's rule has it, or is left
        to XLA as well: what it costs isn't known here, and there is nothing that it has to fit."""
        for node in self.nodes:
            operands = [self.group(v) for v in node.operands]
            if any(group is not None and group.is_free for group in operands):
                for group in map(self.group, node.results):
                    if group is not None and group.known is None and not group.is_free:
                        group.known, group.is_free = group.of_rule, group.of_rule is None


def _is_of_one_shape(equation: Any) -> bool:
    """Whether what a `for_each` takes and gives in each row has one shape, or none. Then it is
    elementwise, and a row of an optimizer's update needn't be walked through, equation by equation.
    """
    params = equation.params
    inner = params["jaxpr"].jaxpr
    return len({v.aval.shape for v in (*inner.invars, *inner.outvars)} - {()}) <= 1
