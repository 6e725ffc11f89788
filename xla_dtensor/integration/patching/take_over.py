"""Replaces the code of torch's functions in place, so that earlier imports see it, too.

Replacing a name in torch's modules reaches nobody who has imported it already (``from
torch.distributed.fsdp import fully_shard`` above ``import xla_dtensor``). So the function object
stays, and gets other code. ``torch.compile``, of code for other devices, sees the function that was
there: it doesn't trace this package's, and would break its graph.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Is given torch's function and the arguments of a call, and returns its result."""

_ARGUMENT, _ORIGINAL, _COMPILES = (
    f"__xla_dtensor_{name}" for name in ("handler", "original", "compiles")
)


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

    function.__code__, function.__defaults__ = _code(original), None
    function.__kwdefaults__ = _defaults(original, call)


def seen_through(mine: Callable[..., Any], original: Any) -> Any:
    """What to put in the place of ``original``, a function written in Python: a function that calls
    ``mine``, with the name and the documentation of ``original``."""

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return mine(*args, **kwargs)

    code, cells = _code(original), original.__closure__
    function = types.FunctionType(code, original.__globals__, closure=cells)
    function.__kwdefaults__ = _defaults(original, call)
    function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return functools.update_wrapper(function, original)


def hide_builtin(module: types.ModuleType, name: str, mine: Callable[..., Any]) -> None:
    """Let a Python module, and no other, find ``mine`` under the name of a builtin function."""
    namespace: dict[str, Any] = {}
    source = f"def {name}_of_python(*args, **kwargs): return {name}(*args, **kwargs)"
    exec(compile(source, module.__file__ or "", "exec"), namespace)
    setattr(module, name, seen_through(mine, namespace[f"{name}_of_python"]))


def _defaults(original: Any, call: Callable[..., Any]) -> dict[str, Any]:
    compiles = torch.compiler.is_dynamo_compiling
    return {_ARGUMENT: call, _ORIGINAL: original, _COMPILES: compiles}


def _code(original: Any) -> types.CodeType:
    """Code that hands a call on. Python wants it to close over as many variables as what it
    replaces does; it needs none of them. It says to be of the same file, in the same line:
    ``torch.compile`` looks there whether it may trace it, and tracebacks show what was called."""
    replaced = original.__code__
    free = replaced.co_freevars
    cells = "".join(f"{variable}, " for variable in free)
    source = (
        f"def make({cells}):\n"
        f"    def function(*args, {_ARGUMENT}, {_ORIGINAL}, {_COMPILES}, **kwargs): return "
        f"({_ORIGINAL}(*args, **kwargs) if {_COMPILES}() else {_ARGUMENT}(args, kwargs)) "
        f"if True else ({cells})\n"
        "    return function\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, replaced.co_filename, "exec"), namespace)
    code = namespace["make"](*[None] * len(free)).__code__
    first = replaced.co_firstlineno
    return code.replace(co_name=replaced.co_name, co_firstlineno=first)
