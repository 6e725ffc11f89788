"""torch's optimizers on xla tensors: a step is one launch, complete or without effect.

With ``foreach`` (the default) or ``fused=True`` an optimizer's ``step`` hands its lists of tensors
to a function like ``torch.optim.adam._multi_tensor_adam``. The operations in these, of all groups,
run as a batch when the step is over; the formula and its Python stay torch's. If something fails
before that, or the launch does, the parameters and the optimizer are as they were before the step.

Ctrl-C waits until a step is done. Steps of other kinds (loops over parameters, the user's own
optimizers) write as they go, as under torch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from xla_dtensor.base import executor, interrupts, thread_state, torch_private
from xla_dtensor.base.numbers.number_functions import larger, smaller
from xla_dtensor.base.ours import is_ours
from xla_dtensor.base.torch_private import OPTIMIZER_FUNCTIONS, set_version_counter
from xla_dtensor.base.torch_private.attributes import set_scripted_as
from xla_dtensor.integration.patching.take_over import hide_builtin, seen_through
from xla_dtensor.runtime import abstract

_SGDS = ("_single_tensor_sgd", "_multi_tensor_sgd", "_fused_sgd")
# Their steps change nothing but through those functions and `_single_tensor_adam` and the like.
_MODULES = {f"torch.optim.{name}" for name in OPTIMIZER_FUNCTIONS} | {"torch.optim.adamw"}


# torch's functions themselves: what their modules have may be a wrapper of the user's around ours.
_torchs: dict[str, Callable[..., None]] = {}


def install() -> None:
    """Wrap the functions, and the ``step`` of every optimizer class."""
    for module_name, names in OPTIMIZER_FUNCTIONS.items():
        module = importlib.import_module(f"torch.optim.{module_name}")
        for name in names:
            of_lists = not name.startswith("_single_tensor_")
            function = getattr(module, name)
            _torchs[name] = inspect.unwrap(function)
            setattr(module, name, _updating(function, of_lists))
        if module_name == "_adafactor":
            # Its formula asks Python for the larger of two numbers, which in a trace have none.
            hide_builtin(module, "min", smaller)
            hide_builtin(module, "max", larger)
    original = Optimizer.profile_hook_step

    def profile_hook_step(function: Callable[..., Any]) -> Callable[..., Any]:
        step = _whole(original(_between_hooks(function)))
        return seen_through(step, original(function))

    # torch wraps a class's step when its first object is made.
    Optimizer.profile_hook_step = staticmethod(profile_hook_step)
    # Of classes that have objects torch has wrapped the step already: it is wrapped anew, with
    # ours.
    classes = [Optimizer]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        step: Any = cls.__dict__.get("step")
        if getattr(step, "hooked", False):
            cls.step = profile_hook_step(step.__wrapped__)
            cls.step.hooked = True


def make_foreach_the_default() -> None:
    """As torch has it for its own DTensor. With the first tensor: torch's DTensor takes long to
    import."""
    from xla_dtensor.tensors.device_tensor import XLATensor
    from xla_dtensor.tensors.marked_tensor import MarkedTensor
    from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

    for listed in (torch_private.foreach_types_of_optimizers, torch_private.foreach_types):
        listed.extend([XLAShardedTensor, XLATensor, MarkedTensor])


class _Step:
    """A step under way, which can be undone.

    Attributes:
        batch: what it has written down.
        whole: whether it is in the batch as a whole.
    """

    def __init__(self, optimizer: Any) -> None:
        from xla_dtensor.dispatch import Batch

        self.batch = Batch(all_or_nothing=True)
        self.whole = True
        self._optimizer = optimizer
        self._states = {p: (state, dict(state)) for p, state in optimizer.state.items()}
        self._versions = [
            (p, p._version)
            for group in optimizer.param_groups
            for p in group["params"]
            if not p.is_inference()
        ]
        # Step counts, mostly, which torch keeps on the CPU and counts up before it computes.
        self._on_cpu = [
            (value, value.item() if not value.ndim else value.clone())
            for state in optimizer.state.values()
            for value in state.values()
            if value.__class__ is torch.Tensor and value.device.type == "cpu"
        ]

    @interrupts.atomic
    def undo(self, error: BaseException) -> None:
        """Put the parameters and the optimizer back to before the step."""
        self.batch.undo(error)
        state = self._optimizer.state
        for p in [p for p in state if p not in self._states]:
            del state[p]
        for p, (inner, entries) in self._states.items():
            inner.clear()
            inner.update(entries)
            state[p] = inner
        with torch.no_grad():
            for tensor, value in self._on_cpu:
                tensor.copy_(value) if tensor.ndim else tensor.fill_(value)
        if self._versions:  # to autograd nothing has been written
            tensors, versions = zip(*self._versions, strict=True)
            set_version_counter(tensors, versions)

    @interrupts.atomic
    def go_on_at_once(self) -> None:
        """From here on the step writes as it goes, and can't be undone."""
        if self.whole:
            self.whole = False
            self.batch.finish()


class _Current(threading.local):
    step: _Step | None = None


_current = _Current()


def _whole(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` as a whole or, if it raises, not at all; and not interrupted."""
    undoable = getattr(step, "__module__", None) in _MODULES

    @interrupts.completed
    def complete(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # In a batch of the user's, the step is a part of that.
        batch = executor.enclosing_batch()
        if batch is not None:
            with batch.in_optimizer():
                return step(optimizer, *args, **kwargs)
        if not undoable:
            return step(optimizer, *args, **kwargs)
        outer = _current.step  # another optimizer's, whose closure or hook this is in
        under_way = _current.step = _Step(optimizer)
        try:
            result = step(optimizer, *args, **kwargs)
            if under_way.whole:
                under_way.batch.finish()
            return result
        except BaseException as error:
            if under_way.whole:
                under_way.undo(error)
            raise
        finally:
            _current.step = outer

    @functools.wraps(step)
    def wrapped(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        groups = optimizer.param_groups
        # A look at each group is enough: torch's optimizers want them on one device.
        ours = any(g["params"] and is_ours(g["params"][0]) for g in groups)
        if not ours or executor.trace() is not None or abstract.current() is not None:
            return step(optimizer, *args, **kwargs)
        if not interrupts.ready():
            interrupts.install()
        if args and callable(args[0]):
            args = (_closure(args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs["closure"] = _closure(kwargs["closure"])
        return complete(optimizer, *args, **kwargs)

    return wrapped


def _between_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` without its hooks, as a trace has it."""

    @functools.wraps(step)
    def computing(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = getattr(executor.trace(), "optimizer_hooks", None)
        if hooks is None:
            return step(optimizer, *args, **kwargs)
        return hooks.step(step, optimizer, args, kwargs)

    return computing


def _closure(function: Callable[[], Any]) -> Callable[[], Any]:
    """The user's computation of the loss, which may take long, and can be interrupted."""

    @interrupts.interruptible
    def closure() -> Any:
        return function()

    return closure


def _updating(function: Callable[..., None], of_lists: bool) -> Callable[..., None]:
    """A function that computes an update, as a part of the step under way; one that takes tensors
    one by one writes as it goes, as on the CPU."""

    def update(params: Any, *args: Any, **kwargs: Any) -> None:
        if executor.trace() is not None:  # one program already
            _traced(function, params, *args, **kwargs)
            return
        under_way = _current.step
        ours = of_lists and params and is_ours(params[0])
        if not ours or abstract.current() is not None:
            _begin(function, params, *args, **kwargs)
            if under_way is not None and params:
                under_way.go_on_at_once()
            # torch's formulas are others while its flag says that it compiles, in whichever thread.
            # Those of lists on the CPU aren't, and needn't wait for a trace.
            with nullcontext() if of_lists else thread_state.tracing:
                function(params, *args, **kwargs)
            return
        from xla_dtensor.dispatch import batched, writing_down

        batch = under_way is not None and under_way.whole
        writing = writing_down(under_way.batch) if batch else batched()  # type: ignore[union-attr]
        with thread_state.tracing, writing:
            for some, some_args, some_kwargs in _by_devices(params, args, kwargs):
                _bring_together(some, some_args, some_kwargs)
                _begin(function, some, *some_args, **some_kwargs)
                function(some, *some_args, **some_kwargs)

    update = seen_through(update, function)
    set_scripted_as(update, function)  # torch.distributed.optim is scripted when it is imported
    return update


def _begin(
    function: Callable[..., None],
    params: Any,
    grads: Any = (),
    buffers: Any = (),
    *_: Any,
    **options: Any,
) -> None:
    """Where a step becomes one program, put zeros where one of torch's SGD functions has no
    momentum yet, so that the first step's program is that of all others.

    torch takes the first gradient as it is, which is what ``momentum * 0 + gradient`` is, but for
    the sign of a zero. With dampening later gradients count less than the first: nothing is done.
    """
    if function.__name__ not in _SGDS or not executor.is_in_step():
        return
    # Asked first, and so in each trace: an audit compares what a step decides by its numbers.
    if options["momentum"] == 0 or options["dampening"] != 0:
        return
    missing = [i for i, buffer in enumerate(buffers) if buffer is None]
    if any(not is_ours(grads[i]) or grads[i]._form.unreduced for i in missing):
        return
    for i in missing:
        buffers[i] = torch.zeros_like(grads[i])


def _traced(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """The same on tracers: where torch takes a tensor's value (``.item()``, or a tensor as a number
    argument), it gets a number that is an input of what it computes."""
    hooks = getattr(executor.trace(), "optimizer_hooks", None)
    if hooks is not None:
        args, kwargs = hooks.formula(args, kwargs)
    _begin(function, *args, **kwargs)
    with thread_state.in_formula():
        if _can_be_fused(function, kwargs, args):
            from xla_dtensor.dispatch.shared_memory import count_writes

            # It calls `torch._fused_adam_`, which `compilation/trace/doubles.py` takes past C++.
            _torchs["_fused_adam"](*args, **kwargs)
            params, _, *state = args[:5]
            count_writes([tensor for some in (params, *state) for tensor in some])
        else:
            function(*args, **kwargs)


def _can_be_fused(function: Callable[..., None], options: dict[str, Any], lists: Any) -> bool:
    """Whether Adam's update of all parameters is one operation, in compiled steps: the same to XLA
    as torch's dozen with each parameter, traced and lowered in a tenth of the time."""
    if function.__name__ not in ("_multi_tensor_adam", "_fused_adam"):
        return False
    if options.get("has_complex") or options.get("differentiable"):
        return False
    if any(isinstance(options.get(name), torch.Tensor) for name in ("beta1", "beta2")):
        return False
    params, *alike, _, steps = lists[:6]
    # After ``model.half()`` torch has an error for state of another dtype.
    same = all(len({t.dtype for t in each}) == 1 for each in zip(params, *alike, strict=True))
    return same and all(is_ours(step) for step in steps)


def _by_devices(params: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """The lists of parameters, gradients and state by sets of devices: the stages of a pipeline in
    one optimizer. Each is a launch, where list by list each would be a dozen.

    torch's functions put new state into the lists, which then is put into the whole ones.
    """
    groups: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        frame = p._form.frame
        groups.setdefault(None if frame is None else frame.device_ids, []).append(i)
    if len(groups) < 2:
        yield params, args, kwargs
        return
    count = len(params)

    def is_list(value: Any) -> bool:
        return isinstance(value, list) and len(value) == count

    for indices in groups.values():
        parts = [[v[i] for i in indices] if is_list(v) else v for v in (params, *args)]
        named = {
            name: [value[i] for i in indices] if is_list(value) else value
            for name, value in kwargs.items()
        }
        yield parts[0], tuple(parts[1:]), named
        wholes = (*args, *kwargs.values())
        for whole, part in zip(wholes, (*parts[1:], *named.values()), strict=True):
            if is_list(whole):
                for i, value in zip(indices, part, strict=True):
                    whole[i] = value


def _bring_together(params: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Move per-device state (step counts) from one device to all of the parameters'.

    The program would leave it there anyway; moved before, the first step's program is that of the
    later steps.
    """
    frame = next((p._form.frame for p in params if p._form.frame is not None), None)
    if frame is None:
        return
    for values in (*args, *kwargs.values()):
        if isinstance(values, list):
            for tensor in values:
                storage = getattr(tensor, "_storage_", None)
                if storage is not None and storage.form.frame is not frame:
                    storage.place(frame)
