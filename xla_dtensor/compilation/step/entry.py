"""``xla_dtensor.compile``: a training step as one XLA program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, overload

from xla_dtensor.base import assertions
from xla_dtensor.base.config import config
from xla_dtensor.compilation.step.base_step import name_of
from xla_dtensor.compilation.step.compiled_step import CompiledStep
from xla_dtensor.compilation.step.replayed import ReplayedStep


@overload
def compile(
    function: Callable[..., Any],
    *,
    compiler_options: dict[str, Any] | None = None,
    audit: int | None = None,
    checks: bool | None = None,
    watch: Literal["auto", "trace"] | None = None,
    buckets: Mapping[str, Any] | None = None,
    layouts: Literal["step", "torch"] | None = None,
) -> CompiledStep: ...


@overload
def compile(
    function: Callable[..., Any],
    *,
    compiler_options: dict[str, Any] | None = None,
    watch: Literal["replay"],
) -> ReplayedStep: ...


def compile(
    function: Callable[..., Any],
    *,
    compiler_options: dict[str, Any] | None = None,
    audit: int | None = None,
    checks: bool | None = None,
    watch: Literal["auto", "trace", "replay"] | None = None,
    buckets: Mapping[str, Any] | None = None,
    layouts: Literal["step", "torch"] | None = None,
) -> CompiledStep | ReplayedStep:
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
            with the program. Default: ``xd.config.audit``, which is 0: never.
        checks: look for indices out of range, and raise after the call that had one; a call then
            waits for the devices. Default: what ``xd.config.checks`` says.
        watch: how a call knows that its program still is the step. ``"trace"``: what the Python
            reads is compared, and it doesn't run; where it can't be one program (it decides by
            values), `DataDependentError` is raised. ``"replay"``: it runs in every call, while the
            devices compute the step before, and what it asks for is compared: some ten
            microseconds an operation, and nothing that could be overlooked. ``"auto"``: as
            ``"trace"``; but where that would raise the step is replayed, with a warning. Default:
            what ``xd.config.watch`` says, which is ``"auto"``.
        buckets: which arguments are padded, by the names of the function's parameters, and to what:
            sizes by dim, ``{"tokens": {1: (512, 1024, 2048)}}``, or `Buckets`, or several. The
            function is given the true length (of ``tokens`` as ``n_tokens``, if it has such a
            parameter), and its results are cut back to it.
        layouts: where the values inside of the step lie. ``"step"``: it is chosen over the whole
            step, so that as little as possible is communicated (``docs/layouts.md``). ``"torch"``:
            each operation's layout rule says, and moves what is cheapest to move for that
            operation. What the user has laid out (arguments, parameters, ``redistribute``) binds,
            and placements that the program sees are torch's, either way. Default: ``"step"``, and
            ``"torch"`` with ``watch="replay"``, which knows no other.

    Returns:
        the `CompiledStep`, or with ``watch="replay"`` the `ReplayedStep`, called like ``function``.

    Raises:
        TypeError: ``function`` can't be called, or is a generator or a coroutine; it has no
            parameter of a name in ``buckets``, or these are no dict.
        ValueError: ``audit`` is no number of calls; ``watch`` or ``layouts`` is something else;
            ``audit``, ``checks``, ``buckets`` or ``layouts="step"`` of a replayed step; (when
            called) an argument is longer than its largest bucket, or it isn't known what of a
            result is padding.
        DataDependentError: (when called) the step needs a value in Python, or can't be one program,
            with ``watch="trace"``, ``audit``, ``checks``, ``buckets`` or ``layouts="step"``, in
            several processes, or with iterators among its arguments.
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
    watch = config.watch if watch is None else watch
    if watch == "replay":
        if audit or checks is not None or buckets is not None or layouts == "step":
            raise ValueError(
                'xd.compile(watch="replay") takes no audit= (its Python runs in every call), no '
                "checks= (indices are looked at as in eager code: xd.config.checks), no buckets= "
                'and no layouts="step"'
            )
        if config.reproducible == "across meshes":
            raise ValueError(
                'xd.compile(watch="replay") with xd.config.reproducible = "across meshes": a '
                'replayed step has no such programs; leave watch="replay" out'
            )
        return ReplayedStep(function, compiler_options)
    if watch not in ("auto", "trace"):
        raise ValueError(f'watch={watch!r}: it is "auto", "trace" or "replay"')
    if layouts not in ("step", "torch", None):
        raise ValueError(f'layouts={layouts!r}: it is "step" or "torch"')
    in_blocks = config.reproducible == "across meshes"
    # What a replayed step doesn't know can't be asked for, and be gone with a warning.
    asks = bool(audit) or checks is not None or buckets is not None or layouts == "step"
    traced_only = watch == "trace" or asks or in_blocks
    if audit is None:
        audit = config.audit
    if isinstance(audit, bool) or audit < 0:
        raise ValueError(f"audit={audit!r}: a number of calls, or 0 for never")
    checks = config.checks in assertions.COMPILED if checks is None else checks
    layouts = layouts or "step"
    return CompiledStep(
        function, compiler_options, audit, checks, buckets, layouts, in_blocks, traced_only
    )


def load_compiled(path: str | Path, step: CompiledStep, *, trusted: bool = False) -> int:
    """Let a step find programs that `CompiledStep.save_compiled` has written, perhaps on another
    machine. Its calls trace and lower the step as ever; what they come to then isn't compiled if it
    is among them, and is if it isn't.

    Args:
        path: of the file.
        step: what `compile` has made of the same function, with the same compiler options.
        trusted: whether you know who has written it. The file has compiled code in it, and a
            pickle: who has made it can run anything here.

    Returns:
        how many programs it has.

    Raises:
        CompiledFileError: you don't say that it can be trusted; it is damaged; or it is of another
            step, or of other devices, versions or options. A program that JAX can't load after all
            raises it when the step is called.
        DivergenceError: of several processes each one has to load the same file, and doesn't.

    Example::

        import torch, xla_dtensor as xd
        x = torch.ones(4, device="xla")
        double = lambda x: x * 2
        xd.compile(double).save_compiled("/tmp/double.xla", x)
        step = xd.compile(double)
        xd.load_compiled("/tmp/double.xla", step, trusted=True)
        assert step(x)[0] == 2 and step.compilations == 0
    """
    if not isinstance(step, CompiledStep):
        raise TypeError(
            'xd.load_compiled(path, step) takes what xd.compile makes (not watch="replay"), no '
            f"{type(step).__name__}"
        )
    return step.load_compiled(path, trusted=trusted)
