"""``xd.scan_layers``: equal layers as one loop of the program, forward and backward.

A Python loop over layers is unrolled: the program grows with the depth, and so does the time to
trace, lower and compile it. Here one layer is traced, and `jax.lax.scan` runs it with each layer's
parameters, which are stacked inside of the step alone: outside, each layer has its own, and so have
optimizers, state dicts and checkpoints.

Backward is a second loop, from the last layer to the first. It computes each layer's forward again
from the input that the first loop has kept, and lets autograd go through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree

from xla_dtensor.base import thread_state
from xla_dtensor.compilation.equal_layers import (
    Unassigned,
    changed,
    check_equal,
    described,
    tensors_of,
)
from xla_dtensor.compilation.scan_inside import Inside
from xla_dtensor.compilation.trace import StepTrace
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, device_form, sharded_form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.read import logical_value
from xla_dtensor.tensors.of_form import Ours, new_tensor


def scan_layers(layers: Iterable[nn.Module]) -> Callable[..., Any]:
    """The layers one after the other, as one loop of a compiled step: what is traced, lowered and
    compiled is one layer, whatever their number. Outside of compiled steps it is a Python loop.

    In the step each layer's forward runs again in backward, as under ``torch.utils.checkpoint``.
    Losses and gradients are those of the Python loop.

    Args:
        layers: modules of equal structure: classes, attributes, and the shapes, dtypes and layouts
            of parameters and buffers (an ``nn.ModuleList``, say). Each takes what the one before
            gives, and further arguments, the same for all.

    Returns:
        a function of the first layer's input and those arguments, which returns the last layer's
        output, a tensor of the input's shape and dtype.

    Raises:
        UnsupportedOpError: (when called in a compiled step) the layers differ, or give another
            shape than they take, or write to what isn't theirs alone (a ``BatchNorm``), or assign
            attributes; in backward: they read what needs a gradient and is neither theirs nor an
            argument, or have changed since forward.

    Example::

        import torch, xla_dtensor as xd

        layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8)).to("xla")
        step = xd.compile(lambda x: xd.scan_layers(layers)(x).sum())
        x = torch.ones(2, 4, device="xla")
        assert torch.allclose(step(x).cpu(), torch.nn.Sequential(*layers)(x).sum().cpu())
    """
    modules = list(layers)

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        trace = thread_state.current()
        if len(modules) < 2 or not isinstance(trace, StepTrace) or not isinstance(x, Ours):
            for layer in modules:
                x = layer(x, *args, **kwargs)
            return x
        return _Layers(trace, modules, args, kwargs).run(x)

    return run


class _Layers:
    """A call of `scan_layers` in a trace."""

    def __init__(
        self,
        trace: StepTrace,
        modules: list[nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        check_equal(modules)
        self.trace, self.first, self.count = trace, modules[0], len(modules)
        # Per layer its tensors, in one order.
        self.tensors = [list(tensors_of(module).values()) for module in modules]
        self.forms = [_fresh(tensor._form) for tensor in self.tensors[0]]
        flat, self._tree = pytree.tree_flatten((args, kwargs))
        self._flat = flat
        self._places = [i for i, value in enumerate(flat) if isinstance(value, Ours)]
        self.others = [flat[i] for i in self._places]
        self.random = trace.random.counter
        self.draws = 0  # random operations of a layer
        self._description = described(self.first)
        self._versions = [tensor._version for tensor in self.others]
        self._autocasts = [
            functools.partial(
                torch.autocast,
                device,
                torch.get_autocast_dtype(device),
                torch.is_autocast_enabled(device),
            )
            for device in ("xla", "cpu")
        ]

    def run(self, x: Any) -> Any:
        own = [tensor for tensors in self.tensors for tensor in tensors]
        return _Scan.apply(self, x, *self.others, *own)

    def layer(self, x: Any, others: list[Any]) -> Any:
        """The first layer's code on the tensors that its parameters now are."""
        flat = list(self._flat)
        for place, value in zip(self._places, others, strict=True):
            flat[place] = value
        args, kwargs = pytree.tree_unflatten(flat, self._tree)
        version = x._storage_.version
        given = pytree.tree_flatten((args, kwargs))
        # As in forward, also where backward is called elsewhere.
        with self._autocasts[0](), self._autocasts[1](), Unassigned(self.first):
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
        if not isinstance(y, Ours) or y.shape != x.shape or y.dtype != x.dtype:
            what = f"{list(y.shape)} {y.dtype}" if isinstance(y, torch.Tensor) else type(y).__name__
            raise UnsupportedOpError(
                f"scan_layers: {type(self.first).__name__} takes {list(x.shape)} {x.dtype} and "
                f"gives {what}; in a loop each layer takes what the one before gives. Run such "
                "layers one by one"
            )
        return y

    def check_unchanged(self) -> None:
        """See that backward can compute what forward has computed.

        Raises:
            UnsupportedOpError: a layer or an argument has changed since.
        """
        what = changed(self._description, self.first)
        for tensor, version in zip(self.others, self._versions, strict=True):
            if what is None and tensor._version != version:
                what = f"an argument of shape {list(tensor.shape)}, which was written to"
        if what is not None:
            raise UnsupportedOpError(
                f"scan_layers: between forward and backward something of the layers has changed: "
                f"{what}. Backward computes the layers again; change it after backward()"
            )

    def stacked(self) -> list[Any]:
        """Per tensor of a layer an array of all layers' values."""
        found = []
        for i, form in enumerate(self.forms):
            values = [logical_value(tensors[i]) for tensors in self.tensors]
            found.append(_stack(form, *values))
        return found

    def inside(self, slices: list[Any], words: Any) -> Inside:
        storages = [tensor._storage_ for tensor in self.tensors[0]]
        return Inside(self.trace, storages, slices, words, self.random)

    def words(self) -> Any:
        """The generator's state before each layer."""
        words = self.trace.rng_words
        low = words[2] + self.draws * jnp.arange(self.count, dtype=jnp.uint32)
        high = words[3] + (low < words[2]).astype(jnp.uint32)
        first, second = (jnp.broadcast_to(words[i], low.shape) for i in range(2))
        return jnp.stack([first, second, low, high], axis=1)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: _Layers, x: Any, *tensors: Any) -> Any:
        trace, form = layers.trace, _fresh(x._form)
        with jax.enable_x64(True):
            start, stacked = logical_value(x), layers.stacked()
            drawn = [0]

            def body(value: Any, xs: Any) -> Any:
                with layers.inside(*xs) as inside:
                    y = layers.layer(new_tensor(value, form), layers.others)
                    result = _in_form(y, form)
                drawn[0] = inside.draws
                return result, value

            end, inputs = jax.lax.scan(body, start, (stacked, layers.words()))
            if drawn[0]:  # each layer has random numbers of its own: once more, with those
                layers.draws = drawn[0]
                end, inputs = jax.lax.scan(body, start, (stacked, layers.words()))
        trace.random.counter = layers.random
        trace.random.advance(layers.draws * layers.count)
        ctx.layers, ctx.form = layers, form
        ctx.stacked, ctx.inputs = stacked, inputs
        return new_tensor(end, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        layers, form = ctx.layers, ctx.form
        layers.check_unchanged()
        needs_x = ctx.needs_input_grad[1]
        count = len(layers.others)
        needs_others = ctx.needs_input_grad[2 : 2 + count]
        own = layers.tensors[0]
        unused: set[int] = set()

        def body(carry: Any, xs: Any) -> Any:
            dy, sums = carry
            value, slices, words = xs
            # As under jax.checkpoint: XLA isn't to take the forward and the backward of a layer
            # apart. It would fold a reshape into one of them, say, and gather its weight twice.
            dy, value, slices = jax.lax.optimization_barrier((dy, value, slices))
            with layers.inside(slices, words), torch.enable_grad():
                x = new_tensor(value, form).requires_grad_(True)
                others = [
                    new_tensor(logical_value(t), _fresh(t._form)).requires_grad_(True) if n else t
                    for t, n in zip(layers.others, needs_others, strict=True)
                ]
                y = layers.layer(x, others)
                wanted = [t for t, n in zip(others, needs_others, strict=True) if n]
                leaves = [x, *wanted, *(t for t in own if t.requires_grad)]
                _check_leaves(y, leaves)
                like = _whole_sums(_fresh(y._form))
                given = new_tensor(_of_form(dy, form, like), like)
                grads = list(torch.autograd.grad(y, leaves, given, allow_unused=True))
                arrays = []
                for i, (leaf, g) in enumerate(zip(leaves, grads, strict=True)):
                    leaf_form = _fresh(leaf._form)
                    if g is None:
                        unused.add(i)
                        arrays.append(jnp.zeros(_logical_shape(leaf_form), leaf_form.jax_dtype))
                    else:
                        arrays.append(_in_form(g, leaf_form))
            dx, *rest = arrays
            sums = [s + g for s, g in zip(sums, rest[: len(sums)], strict=True)]
            return (dx, sums), rest[len(sums) :]

        with jax.enable_x64(True):
            wanted = [t for t, n in zip(layers.others, needs_others, strict=True) if n]
            zeros = [jnp.zeros(_logical_shape(_fresh(t._form)), t._form.jax_dtype) for t in wanted]
            (dx, sums), per_layer = jax.lax.scan(
                body,
                (_in_form(grad, form), zeros),
                (ctx.inputs, ctx.stacked, layers.words()),
                reverse=True,
            )
            # Per tensor with a gradient its layers' gradients.
            apart = [_unstack(array, layers.count) for array in per_layer]
        found = iter(range(len(wanted)))
        of_others = []
        for tensor, needed in zip(layers.others, needs_others, strict=True):
            i = next(found) if needed else None
            gone = i is None or 1 + i in unused
            of_others.append(None if gone else new_tensor(sums[i], _fresh(tensor._form)))
        of_own: list[Any] = []
        with_grad = [i for i, tensor in enumerate(own) if tensor.requires_grad]
        for layer in range(layers.count):
            grads: list[Any] = [None] * len(own)
            for position, i in enumerate(with_grad):
                if 1 + len(wanted) + position not in unused:
                    grads[i] = new_tensor(apart[position][layer], layers.forms[i])
            of_own += grads
        of_x = new_tensor(dx, form) if needs_x and 0 not in unused else None
        ctx.stacked = ctx.inputs = None
        return (None, of_x, *of_others, *of_own)


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


def _fresh(form: Form) -> Form:
    """The form of a tensor of its own with the same value: no pending reduction, no gaps."""
    about = form.shape, None, 0, form.dtype
    if form.mesh is None:
        return device_form(form.frame, *about, varying=form.varying)
    assert form.placements is not None
    return sharded_form(form.mesh, form.placements, *about, varying=form.varying)


def _whole_sums(form: Form) -> Form:
    """The form of a gradient of such a tensor: where that is a sum of parts, each has all of it."""
    if form.mesh is None or form.placements is None:
        return form
    placements = tuple(Replicate() if p.is_partial() else p for p in form.placements)
    return form if placements == form.placements else form.with_placements(form.mesh, placements)


def _logical_shape(form: Form) -> tuple[int, ...]:
    lead = form.array_shape[: len(form.array_shape) - len(form.shape)]
    return (*lead, *form.shape)


def _in_form(tensor: Any, form: Form) -> Any:
    """The logical value of a tensor, laid out as ``form`` says."""
    return _of_form(logical_value(tensor), tensor._form, form)


def _of_form(value: Any, source: Form, form: Form) -> Any:
    if source.varying != form.varying:
        raise UnsupportedOpError(
            f"scan_layers: a layer's result varies along {list(source.varying)}, its argument "
            f"along {list(form.varying)}, and what a layer gives the next one takes. Run such "
            "layers one by one"
        )
    if form.sharding is None or source.placements == form.placements:
        return value
    return jax.lax.with_sharding_constraint(value, form.computed_sharding)


@functools.partial(jax.jit, static_argnums=0)
def _stack(form: Form, *values: Any) -> Any:
    """One equation of the step, whatever the number of layers."""
    stacked = jnp.stack([logical(value, form) for value in values])
    if form.sharding is None:
        return stacked
    spec = jax.sharding.PartitionSpec(None, *form.sharding.spec)
    sharding = jax.sharding.NamedSharding(form.sharding.mesh, spec)
    return jax.lax.with_sharding_constraint(stacked, sharding)


@functools.partial(jax.jit, static_argnums=1)
def _unstack(array: Any, count: int) -> list[Any]:
    return [array[i] for i in range(count)]
