"""Replaces the code of torch's functions in place, so that earlier imports see it, too.

Replacing a name in torch's modules reaches nobody who has imported it already (``from
torch.distributed.fsdp import fully_shard`` above ``import xla_dtensor``). So the function object
stays, and gets other code.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Is given torch's function and the arguments of a call, and returns its result."""

_ARGUMENT = "__xla_dtensor_handler"


def take_over(function: Any, handler: Handler) -> None:
    """Let calls of ``function`` go to ``handler``, once.

    Args:
        function: a function written in Python.
        handler: what to call in its place, with a function that does what ``function`` has done.
    """
    if _ARGUMENT in (function.__kwdefaults__ or {}):
        return
    original = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    original.__kwdefaults__ = function.__kwdefaults__
    original.__dict__.update(function.__dict__)
    if not hasattr(function, "__wrapped__"):  # else that is where its signature is looked for
        function.__signature__ = inspect.signature(function)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return handler(original, args, kwargs)

    code = _code(function.__name__, function.__code__.co_freevars)
    function.__code__, function.__defaults__ = code, None
    function.__kwdefaults__ = {_ARGUMENT: call}


def _code(name: str, free: tuple[str, ...]) -> types.CodeType:
    """Code that hands a call on. Python wants it to close over as many variables as what it
    replaces does; it needs none of them."""
    cells = "".join(f"{variable}, " for variable in free)
    source = (
        f"def make({cells}):\n"
        f"    def function(*args, {_ARGUMENT}, **kwargs):\n"
        f"        if False: ({cells})\n"
        f"        return {_ARGUMENT}(args, kwargs)\n"
        "    return function\n"
    )
    namespace: dict[str, Any] = {}
    # Tracebacks show these lines.
    above = "\n" * (_code.__code__.co_firstlineno + 4)
    exec(compile(above + source, __file__, "exec"), namespace)
    arguments = [None] * len(free)
    return namespace["make"](*arguments).__code__.replace(co_name=name)
