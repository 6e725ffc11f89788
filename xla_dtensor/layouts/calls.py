"""Inlines equations of a jaxpr that call a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Literal, Var

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
"""Primitives that do so."""


def called(equation: Any) -> Any:
    """The jaxpr of the function that one of `CALLS` calls."""
    closed = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
    return getattr(closed, "jaxpr", closed)


def inlined(
    inner: Any, own: dict[Any, Any], visit: Callable[[Any], None]
) -> tuple[list[Any], list[Any]]:
    """The equations and results of a jaxpr. Several calls share it, with variables of their own.

    Args:
        own: by the jaxpr's variables those of its inputs and constants; the others are added.
        visit: is given each equation, in order.
    """

    def renamed(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else own[atom]

    equations = []
    for each in inner.eqns:
        own.update((variable, Var(variable.aval)) for variable in each.outvars)
        invars, outvars = map(renamed, each.invars), map(renamed, each.outvars)
        equations.append(each.replace(invars=list(invars), outvars=list(outvars)))
        visit(equations[-1])
    return equations, [*map(renamed, inner.outvars)]
