"""``xd.scan_layers(layers)``: equal layers as one loop of the program, forward and backward.

A Python loop over layers is unrolled: the program grows with the depth, and so does the time to
trace, lower and compile it. Here one layer is traced, and `jax.lax.scan` runs it with each layer's
parameters, which are stacked inside of the step alone: outside, each layer has its own, and so have
optimizers, state dicts and checkpoints.

Backward is a second loop, from the last layer to the first. It calls each layer again, on the input
that the first loop has kept, and lets autograd go through it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compilation.scan.arrays import (
    fresh,
    in_form,
    logical_shape,
    of_form,
    stack,
    unstack,
    whole_sums,
)
from xla_dtensor.compilation.scan.autocasts import Autocast
from xla_dtensor.compilation.scan.body import LoopBody
from xla_dtensor.compilation.scan.equal_layers import (
    Unassigned,
    changed,
    check_equal,
    described,
    tensors_of,
)
from xla_dtensor.compilation.scan.kept import Residuals, to_devices, to_host
from xla_dtensor.compilation.trace.external_tensors import without_hooks
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.read import logical_value
from xla_dtensor.mesh.memories import check_host_memory
from xla_dtensor.tensors.of_form import is_ours, new_tensor


def loop_of(layers: Iterable[nn.Module], *, recompute: bool, offload: bool) -> Callable[..., Any]:
    """What `scan_layers` returns for given layers."""
    modules = list(layers)

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        trace = executor.trace()
        if len(modules) < 2 or not isinstance(trace, StepTrace) or not is_ours(x):
            for layer in modules:
                x = layer(x, *args, **kwargs)
            return x
        check_equal(modules)
        scan = Layers(trace, modules, args, kwargs, recompute=recompute, offload=offload)
        return scan.run(x)[-1]

    return run


class Layers:
    """A call of layers as one loop, in a trace.

    Args:
        trace: of the step.
        modules: the layers, which are equal (`check_equal`).
        args, kwargs: what all of them are given besides.
        recompute, offload: as of `scan_layers`.
        each: whether each layer's result is wanted, and not the last one's alone.
    """

    def __init__(
        self,
        trace: StepTrace,
        modules: list[nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        recompute: bool,
        offload: bool,
        each: bool = False,
    ) -> None:
        self.trace, self.first, self.count = trace, modules[0], len(modules)
        # Per layer its tensors, in one order.
        self.tensors = [list(tensors_of(module).values()) for module in modules]
        self.forms = [fresh(tensor._form) for tensor in self.tensors[0]]
        flat, self._tree = pytree.tree_flatten((args, kwargs))
        self._flat = flat
        self._places = [i for i, value in enumerate(flat) if is_ours(value)]
        self.others = [flat[i] for i in self._places]
        self.random = trace.random.counter
        self.draws = 0  # random operations of a layer
        self.residuals = None if recompute else Residuals(trace)
        self.offload, self.each = offload, each
        self.description = described(self.first)
        self._versions = [tensor._version for tensor in self.others]
        self._autocast = Autocast.here()

    def run(self, x: Any) -> tuple[Any, ...]:
        """The layers' results, or the last one's alone."""
        if self.offload:
            frame = x._form.frame or self.trace.frame
            check_host_memory(frame, "scan_layers(offload=True)", between=False)
        own = [tensor for tensors in self.tensors for tensor in tensors]
        results: tuple[Any, ...] = _Scan.apply(self, x, *self.others, *own)
        return results

    def layer(self, x: Any, others: list[Any]) -> Any:
        """The first layer's code on the tensors that its parameters now are."""
        flat = list(self._flat)
        for place, value in zip(self._places, others, strict=True):
            flat[place] = value
        args, kwargs = pytree.tree_unflatten(flat, self._tree)
        version = x._storage_.version
        given = pytree.tree_flatten((args, kwargs))
        with self._autocast.again(), Unassigned(self.first):
            y = self.first(x, *args, **kwargs)
        left = pytree.tree_flatten((args, kwargs))
        if left[1] != given[1] or any(a is not b for a, b in zip(left[0], given[0], strict=True)):
            raise UnsupportedOpError(
                f"scan_layers: {type(self.first).__name__} changes a list or a dict among its "
                "arguments, which a loop over layers can't do for each of them; run them one by one"
            )
        if x._storage_.version != version:
            raise UnsupportedOpError(
                f"scan_layers: {type(self.first).__name__} writes to its input of shape "
                f"{list(x.shape)} (relu(inplace=True), say), which is the loop's own. Let it "
                "compute a new tensor, or run such layers one by one"
            )
        if not is_ours(y) or y.shape != x.shape or y.dtype != x.dtype:
            what = f"{list(y.shape)} {y.dtype}" if isinstance(y, torch.Tensor) else type(y).__name__
            raise UnsupportedOpError(
                f"scan_layers: {type(self.first).__name__} takes {list(x.shape)} {x.dtype} and "
                f"gives {what}; in a loop each layer takes what the one before gives. Run such "
                "layers one by one"
            )
        return y

    def others_changed(self) -> Any:
        """A tensor among the arguments that was written to since; None if there is none."""
        pairs = zip(self.others, self._versions, strict=True)
        return next((tensor for tensor, version in pairs if tensor._version != version), None)

    def check_unchanged(self) -> None:
        """See that backward can compute what forward has computed.

        Raises:
            UnsupportedOpError: a layer or an argument has changed since.
        """
        what = changed(self.description, self.first)
        written = self.others_changed()
        if what is None and written is not None:
            what = f"an argument of shape {list(written.shape)}, which was written to"
        if what is not None:
            raise UnsupportedOpError(
                f"scan_layers: between forward and backward something of the layers has changed: "
                f"{what}. Backward computes the layers again; change it after backward()"
            )

    def apart(self, needs_grad: tuple[bool, ...]) -> list[Any]:
        """The arguments, those that need a gradient without their history."""
        return [
            new_tensor(logical_value(t), fresh(t._form)).requires_grad_(True) if needs else t
            for t, needs in zip(self.others, needs_grad, strict=True)
        ]

    def stacked(self) -> list[Any]:
        """Per tensor of a layer an array of all layers' values."""
        found = []
        for i, form in enumerate(self.forms):
            values = [logical_value(tensors[i]) for tensors in self.tensors]
            # A step's first call moves parameters of the default device to all of its devices.
            found.append(stack(form.placed(self.trace.frame), *values))
        return found

    def in_body(self, slices: list[Any], words: Any) -> LoopBody:
        storages = [tensor._storage_ for tensor in self.tensors[0]]
        words = self.trace.rng_words if words is None else words
        return LoopBody(self.trace, storages, slices, words, self.random)

    def words(self) -> Any:
        """The generator's state before each layer; None if it is the same for all."""
        if not self.draws:
            return None
        words = self.trace.rng_words
        low = words[2] + self.draws * jnp.arange(self.count, dtype=jnp.uint32)
        high = words[3] + (low < words[2]).astype(jnp.uint32)
        first, second = (jnp.broadcast_to(words[i], low.shape) for i in range(2))
        return jnp.stack([first, second, low, high], axis=1)


_NOTHING = torch.empty(0)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: Layers, x: Any, *tensors: Any) -> Any:
        trace, form = layers.trace, fresh(x._form)
        with jax.enable_x64(True):
            start, stacked = logical_value(x), layers.stacked()
            drawn = [0]
            needs_others = ctx.needs_input_grad[2 : 2 + len(layers.others)]
            wants_grad = any(ctx.needs_input_grad)

            def body(value: Any, xs: Any) -> Any:
                with layers.in_body(*xs) as inside:
                    x = new_tensor(value, form)
                    saved, others = [], layers.others
                    with contextlib.ExitStack() as saving:
                        if wants_grad and (layers.residuals is not None or layers.each):
                            saving.enter_context(torch.enable_grad())
                            others = layers.apart(needs_others)
                            if layers.residuals is not None:
                                collected = layers.residuals.collected([x, *others])
                                saved = saving.enter_context(collected)
                            x.requires_grad_(True)
                        y = layers.layer(x, others)
                        if layers.each and wants_grad:
                            _check_leaves(y, [x, *others, *layers.tensors[0]])
                    result = in_form(y, form)
                drawn[0] = inside.draws
                kept = [value, *saved] if wants_grad else []
                inputs = [value] if layers.each else []
                return result, (to_host(kept) if layers.offload else kept, inputs)

            scan = functools.partial(jax.lax.scan, body, start, length=layers.count)
            end, (kept, inputs) = scan((stacked, layers.words()))
            if drawn[0]:  # random numbers: trace again, with a state for each layer
                layers.draws = drawn[0]
                end, (kept, inputs) = scan((stacked, layers.words()))
            results = [y for array in inputs for y in unstack(array, layers.count)[1:]]
        trace.random.counter = layers.random
        trace.random.advance(layers.draws * layers.count)
        ctx.layers, ctx.form = layers, form
        ctx.stacked, ctx.kept = stacked, kept
        ctx.save_for_backward(_NOTHING)  # freed with the graph; reading it then raises
        ctx.set_materialize_grads(False)
        return tuple(new_tensor(y, form) for y in (*results, end))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_each: Any) -> Any:
        layers = ctx.layers
        _ = ctx.saved_tensors  # raises torch's error if the graph has been freed
        layers.check_unchanged()
        loop = _Backward(layers, ctx.form, ctx.needs_input_grad[1 : 2 + len(layers.others)])
        return (None, *loop.run(ctx.kept, ctx.stacked, of_each))


class _Backward:
    """The second loop: what each layer's backward pass gives.

    Args:
        form: of what a layer takes and gives.
        needs_grad: whether what the first layer takes needs a gradient, and which arguments do.
    """

    def __init__(self, layers: Layers, form: Form, needs_grad: tuple[bool, ...]) -> None:
        self._layers, self._form = layers, form
        self._needs_x, self._needs_others = needs_grad[0], needs_grad[1:]
        self._wanted = [i for i, needs in enumerate(self._needs_others) if needs]
        self._own = [i for i, t in enumerate(layers.tensors[0]) if t.requires_grad]
        # Of x, the arguments and a layer's tensors, in this order, those without a gradient.
        self._unused: set[int] = set()

    def run(self, kept: Any, stacked: list[Any], of_each: Any) -> list[Any]:
        """The gradients of what the first layer takes, of the arguments, and of the tensors of
        each layer; None where there is none.

        Args:
            kept: what the first loop has kept of each layer.
            stacked: the tensors of the layers.
            of_each: the gradients of the results.
        """
        layers, form = self._layers, self._form
        with jax.enable_x64(True):
            forms = [fresh(layers.others[i]._form) for i in self._wanted]
            zeros = [jnp.zeros(logical_shape(of), of.jax_dtype) for of in forms]
            nothing = jnp.zeros(logical_shape(form), form.jax_dtype)
            *middle, of_end = (nothing if g is None else in_form(g, form) for g in of_each)
            # Gradients of layers' results that something besides the next layer has used.
            used = any(g is not None for g in of_each[:-1])
            of_results = [stack(form, *middle, nothing)] if used else []
            (dx, sums), per_layer = jax.lax.scan(
                self._layer,
                (of_end, zeros),
                (kept, stacked, layers.words(), *of_results),
                length=layers.count,
                reverse=True,
            )
            # Per tensor with a gradient its layers' gradients.
            apart = [unstack(array, layers.count) for array in per_layer]
        of_others: list[Any] = [None] * len(layers.others)
        for position, (i, total) in enumerate(zip(self._wanted, sums, strict=True), 1):
            if position not in self._unused:
                of_others[i] = new_tensor(total, fresh(layers.others[i]._form))
        of_own, first = list[Any](), 1 + len(self._wanted)
        for layer in range(layers.count):
            grads: list[Any] = [None] * len(layers.forms)
            for position, i in enumerate(self._own):
                if first + position not in self._unused:
                    grads[i] = new_tensor(apart[position][layer], layers.forms[i])
            of_own += grads
        of_x = new_tensor(dx, form) if self._needs_x and 0 not in self._unused else None
        return [of_x, *of_others, *of_own]

    def _layer(self, carry: Any, xs: Any) -> Any:
        """One round, from the gradient of a layer's result to that of what it takes."""
        (dy, sums), layers = carry, self._layers
        kept, slices, words, *of_result = xs
        dy = sum(of_result, dy)
        value, *saved = to_devices(kept) if layers.offload else kept
        if layers.residuals is None:
            # As under jax.checkpoint: XLA isn't to take the forward and the backward of a
            # layer apart. It would fold a reshape into one of them, say, and gather its
            # weight twice.
            dy, value, slices = jax.lax.optimization_barrier((dy, value, slices))
        with layers.in_body(slices, words), torch.enable_grad():
            dx, *rest = self._gradients(dy, value, saved)
        sums = [s + g for s, g in zip(sums, rest[: len(sums)], strict=True)]
        return (dx, sums), rest[len(sums) :]

    def _gradients(self, dy: Any, value: Any, saved: list[Any]) -> list[Any]:
        """The first layer again, and back: the gradients of ``value``, which it takes, of the
        arguments, and of its own tensors; zeros where there is none."""
        layers, form = self._layers, self._form
        x = new_tensor(value, form).requires_grad_(True)
        others = layers.apart(self._needs_others)
        own, residuals = layers.tensors[0], layers.residuals
        with contextlib.nullcontext() if residuals is None else residuals.given(saved):
            y = layers.layer(x, others)
            leaves = [x, *(others[i] for i in self._wanted), *(own[i] for i in self._own)]
            _check_leaves(y, leaves)
            like = whole_sums(fresh(y._form))
            dy = new_tensor(of_form(dy, form, like), like)
            # The hooks of the first layer's parameters would run in the body of the loop, which is
            # for all layers; each layer's own run where it gets its gradient. What a layer is given
            # has one that lays its gradient out as itself, which nobody asks for.
            with without_hooks([x, *own]):
                grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
        arrays = []
        for i, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            leaf_form = fresh(leaf._form)
            if grad is None:
                self._unused.add(i)
                arrays.append(jnp.zeros(logical_shape(leaf_form), leaf_form.jax_dtype))
            else:
                arrays.append(in_form(grad, leaf_form))
        return arrays


def _check_leaves(result: torch.Tensor, known: list[Any]) -> None:
    """See that a layer's result depends on nothing else that wants a gradient.

    Raises:
        UnsupportedOpError: it does, and that gradient would be lost.
    """
    seen: set[Any] = set()
    nodes: list[Any] = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not tensor for tensor in known):
            raise UnsupportedOpError(
                f"scan_layers: a layer reads a tensor of shape {list(leaf.shape)} that needs a "
                "gradient, or what was computed from it, and that is neither the layer's nor an "
                "argument of its own: pass it to the layers, xd.scan_layers(layers)(x, tensor), in "
                "tuples, lists or dicts if need be, or run them one by one"
            )
