"""A canonical text of a jaxpr: equal for equal computations.

JAX's own text gives a name to what is used twice, if it is the same object twice: whether it is
depends on JAX's caches.
"""

from __future__ import annotations

import re
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding


def text_of(jaxpr: Any, indent: str = "") -> str:
    """One line per equation; variables are numbered in the order in which they occur."""
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    numbers: dict[Any, int] = {}

    def name(variable: Any) -> str:
        if hasattr(variable, "val"):
            return f"{variable.val!r}:{variable.aval}"
        return f"v{numbers.setdefault(variable, len(numbers))}:{variable.aval}"

    lines = [f"{indent}given {' '.join(map(name, (*jaxpr.constvars, *jaxpr.invars)))}"]
    for equation in jaxpr.eqns:
        inputs = " ".join(map(name, equation.invars))
        outputs = " ".join(map(name, equation.outvars))
        options = ", ".join(
            f"{key}={_option(value, indent)}" for key, value in sorted(equation.params.items())
        )
        lines.append(f"{indent}{outputs} = {equation.primitive.name}[{options}] {inputs}")
    lines.append(f"{indent}gives {' '.join(map(name, jaxpr.outvars))}")
    return "\n".join(lines)


def _option(value: Any, indent: str) -> str:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        return f"\n{text_of(value, indent + '  ')}\n{indent}"
    if isinstance(value, tuple | list):
        return f"({', '.join(_option(part, indent) for part in value)})"
    if isinstance(value, NamedSharding) and not any(value.spec):
        return "None"  # JAX asks constants where they lie: on one device, or whole on each
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
