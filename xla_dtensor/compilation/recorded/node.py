"""The autograd node around a compiled step, and the values that it keeps for its backward pass."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from xla_dtensor.base.torch_private import top_saved_tensors_hooks
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.storage import Storage
from xla_dtensor.movement.redistribute import as_sharded, move
from xla_dtensor.movement.vary import vary
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

_version, _storage = operator.attrgetter("version"), operator.attrgetter("storage")
# Torch's error for a value that a backward pass needs and that isn't there any more.
MODIFIED = "modified by an inplace operation"


class WithHistory(torch.autograd.Function):
    """The node that a compiled step is in its caller's history."""

    @staticmethod
    def forward(ctx: Any, call: NodeCall, *inputs: Any) -> Any:
        results = call.run()
        ctx.backward_of = call.backward
        ctx.set_materialize_grads(False)
        # The saved values live as long as this saved tensor: torch frees it after a backward
        # pass, unless the graph is retained, and raises for a second one.
        token = torch.empty(0)
        token.kept = call.kept
        ctx.save_for_backward(token)
        # Hooks on saved tensors may give another tensor back.
        hooked = top_saved_tensors_hooks(True) is not None
        ctx.kept = call.kept if hooked else None
        call.kept = None
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True goes through a compiled step, whose backward pass is a program "
                "that can't be differentiated again: take the gradient inside of the step "
                "(torch.autograd.grad(..., create_graph=True)), or call the step's function eagerly"
            )
        (token,) = ctx.saved_tensors
        kept = getattr(token, "kept", ctx.kept)
        return (None, *ctx.backward_of(kept, list(grads)))


class OnHost:
    """A CPU tensor as memory that is read: what torch counts of the writes to it."""

    __slots__ = ("form",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.form = tensor

    @property
    def version(self) -> int:
        return 0 if self.form.is_inference() else self.form._version


class MemoryRead:
    """Memory that the backward pass reads, and others may write to before.

    Attributes:
        storage: the memory.
        outputs: the outputs whose gradients come by its value.
        tensor: the one through which torch would read it, if that is one from outside: it may move
            to other memory, and torch would take the value there.
    """

    __slots__ = ("outputs", "storage", "tensor")

    def __init__(self, storage: Storage | OnHost, outputs: set[int], tensor: Any) -> None:
        self.storage, self.outputs, self.tensor = storage, outputs, tensor


class SavedForBackward:
    """What the backward pass of one call needs.

    Attributes:
        residuals: the arrays.
    """

    __slots__ = ("_reads", "_versions", "residuals")

    def __init__(self, residuals: list[Any], reads: list[MemoryRead]) -> None:
        self.residuals, self._reads = residuals, reads
        self._versions = list(map(_version, map(_storage, reads)))

    def check(self, grads: list[Any]) -> None:
        """Refuse a backward pass from ``grads`` that needs what has been overwritten.

        Raises:
            RuntimeError: it does.
        """
        for read, version in zip(self._reads, self._versions, strict=True):
            storage = read.storage
            same = storage.version == version
            if same and (read.tensor is None or read.tensor._storage_ is storage):
                continue
            if any(grads[i] is not None for i in read.outputs):
                what = MODIFIED if not same else "given other memory (.data = or set_)"
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been {what}: "
                    f"a tensor of shape {list(storage.form.shape)}, since the compiled step ran "
                    "whose result is differentiated"
                )


class NodeCall:
    """One call of a program with a history, until it is a node.

    Attributes:
        run: gives the results that have a history.
        backward: the gradients of the inputs, from what was kept and the results' gradients.
        kept: what the backward pass needs, once it has run.
    """

    def __init__(
        self,
        run: Callable[[NodeCall], list[Any]],
        backward: Callable[[SavedForBackward, list[Any]], list[Any]],
    ) -> None:
        self._run, self.backward = run, backward
        self.kept: SavedForBackward | None = None

    def run(self) -> list[Any]:
        return self._run(self)


def cotangent(grad: Any, form: Form) -> Any:
    """The array in ``form`` of a gradient that a result got (None: zeros)."""
    if grad is None:
        return jnp.zeros(form.array_shape, form.jax_dtype, device=form.sharding)
    grad = grad.detach().to(form.dtype)
    if form.mesh is not None:
        grad = as_sharded(grad, form.mesh)
        if grad._steps or grad._form is not form:
            assert form.placements is not None
            grad = move(grad, form.mesh, form.placements)
    elif isinstance(grad, XLAShardedTensor):
        grad = grad.full_tensor()
    if form.varying and grad._form.varying != form.varying:
        assert form.frame is not None
        grad = vary(grad, form.varying, form.frame)
    if form.frame is not None and not grad._steps:
        grad._storage_.place(form.frame)
    return grad.jax_array
