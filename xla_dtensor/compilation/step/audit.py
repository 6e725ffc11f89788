"""The audit: traces a step again, and compares with the program in use."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from xla_dtensor.base.jax_private import summarize_source
from xla_dtensor.base.source_line import is_users
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.recipes import (
    BuiltObject,
    ComputedNumber,
    NewTensor,
    PendingNumber,
)
from xla_dtensor.compilation.objects.found import is_atom
from xla_dtensor.compilation.objects.readers import ReadsMore
from xla_dtensor.compilation.recorded.attempts import trace
from xla_dtensor.compilation.recorded.jaxpr_text import text_of
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.errors import StaleStepError
from xla_dtensor.mesh import Frame
from xla_dtensor.tensors.of_form import is_ours


def compare(name: str, function: Callable[..., Any], traced: Traced, arguments: Arguments) -> None:
    """Trace ``function`` again and compare with ``traced``; nothing else happens.

    Raises:
        StaleStepError: they differ.
    """
    positions = traced.trace.positions is not None
    try:
        inputs = traced.dynamic, traced.names_of_carried, positions
        again, _ = trace(function, arguments, *inputs, items=traced.items)
    except ReadsMore as more:
        raise StaleStepError(
            f"the compiled step {name} is stale: its Python reads attributes of its arguments that "
            "it didn't read when it was traced. Nothing has been computed in this call."
        ) from more
    again.undo()
    again.print_now()
    mine, now = (_signature(t, arguments) for t in (traced, again))
    _add_what_is_there(now["what its Python changes"], traced)
    for what, before in mine.items():
        if before != now[what]:
            raise StaleStepError(
                f"the compiled step {name} is stale: {what} would be others now. Its Python read "
                "something that has changed since it was traced, and that xla_dtensor doesn't "
                "watch: make it an argument, or call step.clear_cache() when it changes. Nothing "
                f"has been computed in this call.{_where(what, traced, again)}"
            )


def _signature(traced: Traced, arguments: Arguments) -> dict[str, Any]:
    """What a later trace must have in common with this one, for the program to be the step."""
    trace = traced.trace
    # Arguments by storage: a trace takes an argument that is also reached by name for the latter.
    given = {
        id(tensor._storage_): i for i, tensor in enumerate(arguments.tensors) if is_ours(tensor)
    }
    return {
        "the operations": text_of(traced.jaxpr),
        "the tensors that it uses": [s.signature(given) for s in traced.inputs.sources],
        "the numbers that it computes with": [number.name for number in trace.numbers.inputs],
        # A set, not counts: RMSprop reads its momentum once more for each state that it makes.
        "what it decides by numbers": {decision.text for decision in trace.numbers.decisions},
        "the layouts of its results": [form.placed(traced.frame) for form in traced.outputs.forms],
        "what it returns": (traced.outputs.tree, list(map(_part, traced.outputs.results))),
        "the gradients that it leaves": [
            (id(outside.get()), _gradient(t, traced.frame)) for outside, t in traced.outputs.grads
        ],
        "what its Python changes": {
            (e.place.container, e.place.path, key): _left(value)
            for e in traced.effects.all
            for key, value in e.after.items()
        },
        "the state that it takes from where it is": [(c.name, c.where()) for c in traced.carried],
    }


def _add_what_is_there(changes: dict[Any, Any], traced: Traced) -> None:
    """What an earlier call has put somewhere, and this one would put there again, is no change."""
    for effect in traced.effects.all:
        for key, value in effect.after.items():
            if effect.argument is None and is_atom(value) and value is effect.place.at(key):
                changes.setdefault((effect.place.container, effect.place.path, key), _left(value))


def _gradient(recipe: Any, frame: Frame | None) -> Any:
    if isinstance(recipe, NewTensor):
        return recipe.index, recipe.form.placed(frame)
    return None if recipe is None else _part(recipe)


def _part(result: Any) -> Any:
    """What tells one of a step's results, or what it leaves somewhere, from another."""
    if isinstance(result, ComputedNumber):
        return "number", result.node.text
    if isinstance(result, PendingNumber):
        return "number", result.text, [tensor.index for tensor in result.items.values()]
    return type(result), getattr(result, "index", None) or repr(getattr(result, "value", None))


def _left(value: Any) -> Any:
    if isinstance(value, BuiltObject):
        return list(map(_part, value.parts)), value.tree
    return repr(value) if is_atom(value) else type(value)


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
    return f" at {summarize_source(equation.source_info)}"


def _texts(operations: list[tuple[str, str]]) -> str:
    if not operations:
        return "nothing"
    return "; ".join(text + line for text, line in operations[:2])
