"""Moves casts of a loop's slices (bfloat16 parameters) out of the loop, which saves memory.

A layer that computes in bfloat16 with parameters in float32 casts each of them, and its gradient
back, in each round. The loop then takes the stack of its layers' parameters in float32, and gives
that of their gradients. Cast before and behind it, they take half the memory.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Var

from xla_dtensor.base import jax_private


def casts_outside(jaxpr: Any) -> Any:
    """``jaxpr`` with slices of its loops cast outside of them, to what has fewer bits. The values
    are the same: a cast is one of each element, and one to more bits and back changes nothing.

    Args:
        jaxpr: of a step.
    """
    equations: list[Any] = []
    made: set[Any] = set()
    for equation in jaxpr.eqns:
        is_loop = equation.primitive.name == "scan"
        equations += _Loop(equation).with_casts_outside(made) if is_loop else [equation]
        made.update(equation.outvars)
    return jaxpr.replace(eqns=equations)


class _Loop:
    """A ``scan`` equation.

    Args:
        equation: it.
    """

    def __init__(self, equation: Any) -> None:
        self._equation = equation
        self._body = equation.params["jaxpr"].jaxpr
        self._users: dict[Any, list[Any]] = {}
        self._makers: dict[Any, Any] = {}
        for each in self._body.eqns:
            for atom in {id(a): a for a in each.invars if isinstance(a, Var)}.values():
                self._users.setdefault(atom, []).append(each)
            self._makers.update(dict.fromkeys(each.outvars, each))
        self._given = Counter(a for a in self._body.outvars if isinstance(a, Var))
        # Variables of the body: by the wide one the narrow one that replaces it.
        self._narrow: dict[Any, Any] = {}
        # Casts that became no-ops: by their result their operand.
        self._instead: dict[Any, Any] = {}

    def with_casts_outside(self, made: set[Any]) -> list[Any]:
        """The equation and the casts before and behind it.

        Args:
            made: the values that the step has made before. What it was given is there anyway, and
                cast it would be there twice.
        """
        equation, params = self._equation, self._equation.params
        constants, carried = jax_private.loop_parts(equation)
        operands, results = list(equation.invars), list(equation.outvars)
        before, behind = [], []
        for i in range(constants + carried, len(operands)):
            is_made = isinstance(operands[i], Var) and operands[i] in made
            dtype = self._take_cast(self._body.invars[i]) if is_made else None
            if dtype is not None:
                before.append(_cast(operands[i], dtype))
                (operands[i],) = before[-1].outvars
        for i in range(carried, len(results)):
            dtype = self._give_uncast(self._body.outvars[i])
            if dtype is not None:
                narrow = Var(results[i].aval.update(dtype=dtype))
                behind.append(_cast(narrow, results[i].aval.dtype, results[i]))
                results[i] = narrow
        if not before and not behind:
            return [equation]
        consts = params["jaxpr"].consts
        params = {**params, "jaxpr": ClosedJaxpr(self._rewritten(), consts)}
        loop = equation.replace(invars=operands, outvars=results, params=params)
        return [*before, loop, *behind]

    def _take_cast(self, variable: Any) -> Any:
        """Let an input be what it is cast to; the dtype of that. None where it is used in another
        way, too."""
        users = self._users.get(variable, [])
        if len(users) != 1 or self._given[variable]:
            return None
        (user,) = users
        if user.primitive.name == "optimization_barrier":
            places = [i for i, atom in enumerate(user.invars) if atom is variable]
            dtype = self._take_cast(user.outvars[places[0]]) if len(places) == 1 else None
        elif _bits(user) < 0:
            dtype = user.params["new_dtype"]
            self._instead[user.outvars[0]] = variable
        else:
            return None
        if dtype is not None:
            self._narrow[variable] = Var(variable.aval.update(dtype=dtype))
        return dtype

    def _give_uncast(self, variable: Any) -> Any:
        """Let a result be what it was cast from, before it was laid out; the dtype of that. None
        where it is something else, or used elsewhere."""
        maker = self._makers.get(variable) if isinstance(variable, Var) else None
        if maker is None or self._users.get(variable, []) or self._given[variable] > 1:
            return None
        return self._uncast(variable, maker)

    def _uncast(self, variable: Any, maker: Any) -> Any:
        if _bits(maker) > 0:
            self._instead[variable] = maker.invars[0]
            return maker.invars[0].aval.dtype
        (source,) = maker.invars if maker.primitive.name in _LAY_OUT else (None,)
        before = self._makers.get(source)
        if before is None or len(self._users[source]) > 1 or self._given[source]:
            return None
        dtype = self._uncast(source, before)
        if dtype is not None:
            self._narrow[variable] = Var(variable.aval.update(dtype=dtype))
        return dtype

    def _rewritten(self) -> Any:
        def now(atom: Any) -> Any:
            while isinstance(atom, Var) and atom in self._instead:
                atom = self._instead[atom]
            return self._narrow.get(atom, atom) if isinstance(atom, Var) else atom

        equations = [
            each.replace(
                invars=[*map(now, each.invars)],
                outvars=[self._narrow.get(v, v) for v in each.outvars],
            )
            for each in self._body.eqns
            if not {*each.outvars} & self._instead.keys()
        ]
        inputs = [self._narrow.get(v, v) for v in self._body.invars]
        results = [*map(now, self._body.outvars)]
        return self._body.replace(invars=inputs, eqns=equations, outvars=results)


def _bits(equation: Any) -> int:
    """How many bits a cast of floating-point numbers adds; less than 0 where it takes some. 0 of
    other equations, and of casts of which neither they nor their opposite keep the value."""
    if equation.primitive.name != "convert_element_type":
        return 0
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    widens = _EXACT.get((str(before), str(after)))
    narrows = _EXACT.get((str(after), str(before)))
    return widens or -(narrows or 0)


_LAY_OUT = ("sharding_constraint", "pin")

_EXACT = {
    ("bfloat16", "float32"): 16,
    ("float16", "float32"): 16,
    ("float32", "float64"): 32,
}
"""Casts that lose nothing, by the bits that they add."""


def _cast(variable: Any, dtype: Any, result: Any = None) -> Any:
    """An equation that casts an array, to ``result`` if that is given."""
    shape = jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
    closed = jax.make_jaxpr(lambda x: jax.lax.convert_element_type(x, dtype))(shape)
    (equation,) = closed.jaxpr.eqns
    made = Var(variable.aval.update(dtype=np.dtype(dtype))) if result is None else result
    return equation.replace(invars=[variable], outvars=[made])
