"""``xla_dtensor.compile``: a training step as one XLA program."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from xla_dtensor.base import assertions
from xla_dtensor.compilation.step import CompiledStep, name_of

AUDIT_VARIABLE = "XLA_DTENSOR_AUDIT"


def compile(
    function: Callable[..., Any],
    *,
    compiler_options: dict[str, Any] | None = None,
    audit: int | None = None,
    checks: bool | None = None,
) -> CompiledStep:
    """Make ``function``, a training step in ordinary torch code, run as one XLA program.

    The first call traces it: forward, backward, clipping, ``optimizer.step()``. Tensors that it
    uses are found by identity, wherever its Python has them from, and become inputs (donated where
    it overwrites them); those that it leaves behind (``.grad``, optimizer state) become outputs.
    What else its Python reads is watched: later calls run the program, or trace again what has
    changed and say so in ``recompilations``. The whole contract is in ``docs/compile.md``.

    The Python in ``function`` runs when it is traced, and not in every call, as under ``jax.jit``.
    A result with a history under torch has one here: its backward pass is a second program.
    Threads may share a step: its calls come one after another, and one trace runs at a time.

    Args:
        function: the step; a method, too (``@xd.compile`` in a class).
        compiler_options: passed to XLA's compiler, by name, as ``jax.jit``'s are.
        audit: in every ``audit``-th call, run the step's Python again and compare what it would do
            with the program. Default: the environment variable ``XLA_DTENSOR_AUDIT``, or never.
        checks: look for indices out of range, and raise after the call that had one; a call then
            waits for the devices. Default: whether ``XLA_DTENSOR_CHECKS`` is ``all``.

    Returns:
        the `CompiledStep`, called like ``function``.

    Raises:
        TypeError: ``function`` can't be called, or is a generator or a coroutine.
        ValueError: ``audit`` is no number of calls.
        DataDependentError: (when called) the step needs a value in Python, or can't be one program.
        MeshMismatchError: (when called) it uses tensors on different sets of devices.
        StaleStepError: (when called) an audit has found a difference.

    Example::

        import torch, xla_dtensor as xd

        model = torch.nn.Linear(16, 4).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        @xd.compile
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()
        losses = [step(torch.ones(8, 16, device="xla")).item() for _ in range(3)]
        assert losses[2] < losses[0] and step.compilations == 1
    """
    if not callable(function):
        raise TypeError(f"xd.compile takes a function (the step), not {function!r}")
    code = inspect.unwrap(function)
    if inspect.isgeneratorfunction(code) or inspect.iscoroutinefunction(code):
        raise TypeError(
            f"xd.compile: {name_of(function)} is a generator or a coroutine, whose Python goes on "
            "when its caller asks; a step is one program: let it return its results"
        )
    if audit is None:
        audit = int(os.environ.get(AUDIT_VARIABLE, "0"))
    if isinstance(audit, bool) or audit < 0:
        raise ValueError(f"audit={audit!r}: a number of calls, or 0 for never")
    checks = assertions.switch.compiled if checks is None else checks
    return CompiledStep(function, compiler_options, audit, checks)
