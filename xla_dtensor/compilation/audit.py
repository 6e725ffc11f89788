"""The audit: is a program still what the step's Python would do now?"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from jax._src import source_info_util

from xla_dtensor.base.source_line import is_users
from xla_dtensor.compilation.arguments import Arguments, ReadsMore
from xla_dtensor.compilation.attempts import trace
from xla_dtensor.compilation.traced import Traced
from xla_dtensor.errors import StaleStepError


def compare(name: str, function: Callable[..., Any], traced: Traced, arguments: Arguments) -> None:
    """Trace ``function`` again and compare with ``traced``; nothing else happens.

    Raises:
        StaleStepError: they differ.
    """
    try:
        again, _ = trace(function, arguments, traced.dynamic, traced.names_of_carried)
    except ReadsMore as more:
        raise StaleStepError(
            f"the compiled step {name} is stale: its Python reads attributes of its arguments that "
            "it didn't read when it was traced. Nothing has been computed in this call."
        ) from more
    again.undo()
    mine, now = traced.signature(), again.signature()
    for what, before in mine.items():
        if before != now[what]:
            raise StaleStepError(
                f"the compiled step {name} is stale: {what} would be others now. Its Python read "
                "something that has changed since it was traced, and that xla_dtensor doesn't "
                "watch: make it an argument, or call step.clear_cache() when it changes. Nothing "
                f"has been computed in this call.{_where(what, traced, again)}"
            )


def _where(what: str, traced: Traced, again: Traced) -> str:
    """The first operations that differ, with the user's lines."""
    if what != "the operations":
        return ""
    before, now = (_operations(t) for t in (traced, again))
    matcher = difflib.SequenceMatcher(None, [o[0] for o in before], [o[0] for o in now])
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag != "equal":
            return f"\n  traced:  {_texts(before[i:i_end])}\n  now:     {_texts(now[j:j_end])}"
    return ""


def _operations(traced: Traced) -> list[tuple[str, str]]:
    found = []
    for equation in traced.jaxpr.eqns:
        outputs = ", ".join(str(v.aval) for v in equation.outvars)
        constants = [str(v) for v in equation.invars if hasattr(v, "val")]
        text = f"{equation.primitive.name}({', '.join(constants)}) -> {outputs}"
        found.append((text, _line(equation)))
    return found


def _line(equation: Any) -> str:
    traceback = equation.source_info.traceback
    if traceback is None:
        return ""
    for frame in traceback.frames:
        if is_users(frame.file_name):
            return f" at {frame.file_name}:{frame.line_num}"
    return f" at {source_info_util.summarize(equation.source_info)}"


def _texts(operations: list[tuple[str, str]]) -> str:
    if not operations:
        return "nothing"
    return "; ".join(text + line for text, line in operations[:2])
