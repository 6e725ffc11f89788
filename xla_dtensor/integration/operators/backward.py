"""Errors and interrupts in backward passes of xla tensors, which would otherwise end the process.

While an exception of Python leaves a node of the autograd graph, the engine asks the device guard
what device it guards (C++: ``~InlineStreamGuard`` -> ``PythonDeviceGuard::type``, ``noexcept``).
The guard of an out-of-tree backend can be a Python object, and ours is. CPython forbids a call to
return with an exception pending, so ``std::terminate`` follows. Therefore the guard takes the
exception away when it is asked, and it is raised again where the backward pass was started.
Checked on torch 2.11 to 2.15.

A Ctrl-C waits until the pass is done, and all leaves have their gradients; a second one is raised
between two of its operations, like an error there (`interrupts.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from xla_dtensor.base import executor, forked, interrupts, torch_private
from xla_dtensor.errors import UnsupportedOpError

_CPU = torch.device("cpu")
# Of torch's engine, behind the outputs.
_ARGUMENTS = ("grad_tensors", "keep_graph", "create_graph", "inputs")


def install() -> None:
    """Wrap the function through which every backward pass of Python starts, as
    ``torch.compiler`` does for its own ends."""
    original = torch_private.run_backward

    @interrupts.completed
    def complete(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        from xla_dtensor.execution import lazy

        interrupts.take_error()
        # In this thread: the exception is put aside here, and thread-local state (a trace, JAX's
        # 64-bit types) holds. Nothing is lost, the devices work asynchronously.
        with torch.autograd.set_multithreading_enabled(False):
            try:
                result = original(outputs, *args, **kwargs)
                # The end of a pass is the same place in each step, so the batch's program is found
                # again. In a trace the pass is part of that, which a batch may be launching (a JAX
                # function whose gradient is torch's).
                if executor.trace() is None and not forked.is_child():
                    lazy.flush()
                return result
            except SystemError:  # "returned NULL without setting an exception"
                error = interrupts.take_error()
                if error is None:
                    raise
        raise error

    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # From a CPU result the graph may lead to xla tensors (`.cpu()`); for one that does not
        # nothing changes, as CPU nodes run in this thread anyway.
        if not all(getattr(t, "device", _CPU).type in ("xla", "cpu") for t in outputs):
            with _of_other_devices(outputs):
                return original(outputs, *args, **kwargs)
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        accumulates = given.get("accumulate_grad", True)
        to_leaves = accumulates and not given.get("inputs")
        if not forked.is_child():  # where CPU tensors have gradients, and xla operations raise
            keeps = bool(given.get("keep_graph"))
            executor.current().backward(outputs, keeps, accumulates, to_leaves)
            if not interrupts.ready():
                interrupts.install()
        return complete(outputs, *args, **kwargs)

    torch_private.replace("run_backward", run_backward)
    # torch.autograd has imported it by name.
    torch_private.replace("run_backward_in_autograd", run_backward)


@contextlib.contextmanager
def _of_other_devices(outputs: Any) -> Iterator[None]:
    """Torch's engine has streams for one accelerator of a process, and that is the out-of-tree
    device as soon as there is one (pytorch/pytorch#161129): it fails an assertion for CUDA's."""
    try:
        yield
    except RuntimeError as error:
        if "opt_ready_stream" not in str(error):
            raise
        devices = ", ".join(sorted({str(t.device) for t in outputs}))
        raise UnsupportedOpError(
            f"backward of tensors on {devices} in a process that has imported xla_dtensor: torch's "
            "autograd knows one accelerator, and that is 'xla' now (pytorch/pytorch#161129). Move "
            "the model to 'xla', which runs on this GPU, too, or train on "
            f"{devices} in a process that doesn't import xla_dtensor"
        ) from error
