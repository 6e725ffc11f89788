"""The walk of `joined.py` over a jaxpr, and values that it keeps with dims unmerged."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var

from xla_dtensor.layouts.calls import CALLS, called, inlined
from xla_dtensor.layouts.factors import shape_of

Sizes = tuple[int, ...]

Rule = Callable[["JaxprWalk", Any], bool]
"""Adds what takes the place of an equation some of whose operands are apart, or says that it
can't."""

# Applied to an input (a weight) these keep its layout. (The result of a reshape or a broadcast of
# one is computed by the program, and may be laid out anew.)
_AS_GIVEN = ("pin", "transpose", "convert_element_type", "copy")


@dataclass(frozen=True)
class Apart:
    """A value whose dims are kept apart.

    Attributes:
        variable: the value with all its dims, none of which has length 1.
        dims: of each of the value's own dims the lengths of those that it consists of, none if it
            has length 1.
    """

    variable: Any
    dims: tuple[Sizes, ...]

    def places(self, dim: int) -> list[int]:
        """Where those are that a dim consists of."""
        start = sum(map(len, self.dims[:dim]))
        return [*range(start, start + len(self.dims[dim]))]


class JaxprWalk:
    """A walk through the equations of a jaxpr, in order, that makes others of some of them.

    Args:
        rule: of an equation, if there is one.
        devices: along each mesh axis.
        in_doubt: whether parts are kept apart where that is doubtful.

    Attributes:
        made: the equations of the new jaxpr so far.
        changed: whether they are others than the old one's.
        doubts: whether a product has dims that are apart of which `can_cut` is doubtful.
    """

    def __init__(
        self, rule: Callable[[Any], Rule | None], devices: Sequence[int], in_doubt: bool
    ) -> None:
        self._rule, self._devices, self._in_doubt = rule, devices, in_doubt
        self.doubts = False
        self.made: list[Any] = []
        self.changed = False
        self._apart: dict[Any, Apart] = {}
        self._whole: dict[Any, Any] = {}
        self._without_ones: dict[Any, Apart] = {}
        self._computed: set[Any] = set()
        self._of: Any = None

    def of(self, jaxpr: Any) -> Any:
        """``jaxpr``, with what was walked through in the place of its equations."""
        self.through(jaxpr.eqns)
        results = [self.whole(atom) for atom in jaxpr.outvars]
        return jaxpr.replace(eqns=self.made, outvars=results) if self.changed else jaxpr

    def through(self, equations: Iterable[Any]) -> None:
        """Go on with these."""
        for equation in equations:
            self._of = equation
            name = equation.primitive.name
            rule = self._rule(equation)
            apart = any(self._is_apart(atom) for atom in equation.invars)
            if name == "reshape" and equation.params["dimensions"] is None:
                self._reshape(equation)
            elif apart and name in CALLS:
                self._call(equation)
            elif not (apart and rule is not None and rule(self, equation)):
                operands = [self.whole(atom) for atom in equation.invars]
                equation = self._inside(equation)
                same = all(a is b for a, b in zip(operands, equation.invars, strict=True))
                self.made.append(equation if same else equation.replace(invars=operands))
            if name not in _AS_GIVEN or not self.is_given(equation.invars[0]):
                self._computed |= {*equation.outvars}

    # --- values -------------------------------------------------------------------------------

    def whole(self, atom: Any) -> Any:
        """A value as the program has it."""
        if isinstance(atom, Literal):
            return atom
        if atom not in self._whole and atom in self._apart:
            self._whole[atom] = self._reshaped(self._apart[atom].variable, shape_of(atom))
        return self._whole.get(atom, atom)

    def has(self, atom: Any) -> Apart:
        """A value with its dims apart."""
        if isinstance(atom, Literal):  # a number
            return Apart(atom, ())
        found = self._apart.get(atom) or self._without_ones.get(atom)
        if found is None:
            dims = tuple((n,) if n != 1 else () for n in shape_of(atom))
            found = Apart(self._reshaped(self.whole(atom), flat(dims)), dims)
            self._without_ones[atom] = found
        return found

    def split(self, atom: Any, dims: Sequence[Sizes]) -> Any:
        """A value whose dims consist of these, which are those that it has, or parts of them, or
        several of them joined."""
        return self._reshaped(self.has(atom).variable, flat(dims))

    def is_given(self, atom: Any) -> bool:
        """Whether a value comes from outside: where it lies is known, and needn't be possible for
        parts of its dims."""
        return not isinstance(atom, Literal) and atom not in self._computed

    def is_joined(self, atom: Any, dim: int) -> bool:
        """Whether a dim consists of several."""
        return self._is_apart(atom) and len(self._apart[atom].dims[dim]) > 1

    def can_cut(self, sizes: Sizes) -> bool | None:
        """Whether each axis that could cut a dim can cut the first of its parts. False if one of
        them can't cut any; None, which is doubtful, if one can only cut another part: heads next to
        the batch, which is of use, or what is inside of a head, which is of none."""
        joined = math.prod(sizes)
        found: bool | None = True
        for n in self._devices if len(sizes) > 1 else ():
            if joined % n == 0 and sizes[0] % n:
                if all(size % n for size in sizes):
                    return False
                found = None
        return found

    def puts(
        self,
        operands: Sequence[Any],
        *results: Sequence[Sizes],
        params: Mapping[str, Any] | None = None,
    ) -> bool:
        """Put the equation that is walked through, of other operands, in its place.

        Args:
            results: of which parts the dims of its results consist.
            params: those that are others.

        Returns:
            True: it has been done.
        """
        shaped = zip(self._of.outvars, results, strict=True)
        made = [Var(result.aval.update(shape=flat(dims))) for result, dims in shaped]
        changed = {**self._of.params, **(params or {})}
        self.made.append(self._of.replace(invars=[*operands], outvars=[*made], params=changed))
        for result, variable, dims in zip(self._of.outvars, made, results, strict=True):
            self.gives(result, variable, dims)
        return True

    def gives(self, result: Any, variable: Any, dims: Sequence[Sizes]) -> None:
        """A result, with its dims apart, or, where none of them are, as it is."""
        self.changed = True
        if any(len(sizes) > 1 for sizes in dims):
            self._apart[result] = Apart(variable, tuple(dims))
        else:
            self._whole[result] = self._reshaped(variable, shape_of(result))

    def _is_apart(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in self._apart

    def _reshaped(self, variable: Any, shape: Sizes) -> Any:
        if shape_of(variable) == shape:
            return variable
        result = Var(variable.aval.update(shape=shape))
        reshape = _reshape(shape_of(variable), variable.aval.dtype, shape)
        own = {} if self._of is None else {"source_info": self._of.source_info}
        self.made.append(reshape.replace(invars=[variable], outvars=[result], **own))
        return result

    # --- equations ----------------------------------------------------------------------------

    def _reshape(self, equation: Any) -> None:
        (operand,), (result,) = equation.invars, equation.outvars
        known = self._apart.get(operand) if self._is_apart(operand) else None
        before = shape_of(known.variable) if known else shape_of(operand)
        parts = None if isinstance(operand, Literal) else common(before, shape_of(result))
        joins = parts is not None and any(len(sizes) > 1 for sizes in parts)
        if (known is None and not joins) or parts is None:
            self.made.append(equation.replace(invars=[self.whole(operand)]))
        else:
            variable = known.variable if known else self.whole(operand)
            kept = [sizes if self._keeps(sizes) else (math.prod(sizes),) for sizes in parts]
            self.gives(result, self._reshaped(variable, flat(kept)), kept)

    def _keeps(self, sizes: Sizes) -> bool:
        found = self.can_cut(sizes)
        return self._in_doubt if found is None else found

    def _call(self, equation: Any) -> None:
        inner = called(equation)
        if inner.constvars:  # constants of the inner jaxpr have no variable in the outer one
            self.made.append(equation.replace(invars=[*map(self.whole, equation.invars)]))
            return
        own = dict(zip(inner.invars, equation.invars, strict=True))
        _, results = inlined(inner, own, lambda each: self.through([each]))
        self._of, self.changed = equation, True
        for result, atom in zip(equation.outvars, results, strict=True):
            if self._is_apart(atom):
                self._apart[result] = self._apart[atom]
            else:
                self._whole[result] = self.whole(atom)

    def _inside(self, equation: Any) -> Any:
        """An equation with the jaxpr of a loop's body, or of a function, apart likewise."""
        closed = equation.params.get("jaxpr")
        if equation.primitive.name not in (*CALLS, "scan") or not isinstance(closed, ClosedJaxpr):
            return equation
        walk = JaxprWalk(self._rule, self._devices, self._in_doubt)
        inner = walk.of(closed.jaxpr)
        self.doubts |= walk.doubts
        if inner is closed.jaxpr:
            return equation
        self.changed = True
        jaxpr = ClosedJaxpr(inner, closed.consts)
        return equation.replace(params={**equation.params, "jaxpr": jaxpr})


@functools.lru_cache(1024)
def _reshape(before: Sizes, dtype: Any, after: Sizes) -> Any:
    reshape = lambda x: jax.lax.reshape(x, after)
    (equation,) = jax.make_jaxpr(reshape)(jax.ShapeDtypeStruct(before, dtype)).jaxpr.eqns
    return equation


def common(before: Sizes, after: Sizes) -> tuple[Sizes, ...] | None:
    """The dims between two shapes of one size: of which parts, that are dims of both or parts of
    them, each dim of the second consists. None if there are no such parts.

    >>> common((6, 4, 8), (24, 2, 4))
    ((6, 4), (2,), (4,))
    """
    if 0 in before or 0 in after:
        return None
    ends = (itertools.accumulate(shape, operator.mul, initial=1) for shape in (before, after))
    places = sorted({*itertools.chain.from_iterable(ends)})
    if any(b % a for a, b in itertools.pairwise(places)):
        return None
    found, start = [], 1
    for size in after:
        end = start * size
        own = [place for place in places if start <= place <= end]
        found.append(tuple(b // a for a, b in itertools.pairwise(own)))
        start = end
    return tuple(found)


def flat(dims: Iterable[Sizes]) -> Sizes:
    return tuple(itertools.chain.from_iterable(dims))
