"""`jax_function`: a JAX function as a differentiable torch callable.

Every call becomes one operation of dispatch, ``xla_dtensor::jax_call``, whose lowering is the
function. So it has what every operation has: an executable per kind of call, both views, tracing
inside of ``compile``, layouts by a rule or by the compiler.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.base.dtypes import to_jax_dtype, to_torch_dtype
from xla_dtensor.base.tables.cache import Interned
from xla_dtensor.base.tables.keys import exact
from xla_dtensor.errors import LayoutRuleError, UnsupportedOpError
from xla_dtensor.lowering import lowers
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.rules import Call, register_rule
from xla_dtensor.rules.notation import validate
from xla_dtensor.runtime.jax_runtime import default_dtypes
from xla_dtensor.tensors.of_form import is_ours

_library = torch.library.Library("xla_dtensor", "FRAGMENT")
_library.define("jax_call(Tensor[] arrays, int call) -> Tensor[]")


@dataclass(eq=False)
class _JaxCall:
    """One way to call a JAX function: which arguments are arrays, and what the others are.

    Attributes:
        name: the function's, for messages.
        function: takes the arrays, returns any structure of arrays.
        vjp: takes the arrays, what ``function`` returned, and a cotangent of its structure; returns
            a gradient or None per array. None: JAX differentiates the function.
        rule: a notation of the layouts, or None to let the compiler choose them.
        number: its place in `_CALLS`; the operation's argument.
    """

    name: str
    function: Callable[..., Any]
    vjp: Callable[..., Any] | None
    rule: str | None
    number: int = -1
    _structures: dict[Any, Any] = field(default_factory=dict)
    _gradients: dict[Any, _JaxCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        _CALLS.put(self.number, self)

    def run(self, *arrays: Any) -> Any:
        """The function's results, with JAX's defaults in place of dispatch's (64-bit ones)."""
        with default_dtypes():
            return self.function(*arrays)

    def structure(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[Any]]:
        """The tree of the results of ``tensors`` of these shapes, and their shapes and dtypes."""
        key = tuple((tuple(x.shape), x.dtype) for x in tensors)
        known = self._structures.get(key)
        if known is None:
            with jax.enable_x64(True):
                shapes = [jax.ShapeDtypeStruct(s, to_jax_dtype(d)) for s, d in key]
                out = jax.eval_shape(self.run, *shapes)
            leaves, tree = jax.tree.flatten(out)
            known = self._structures[key] = tree, leaves
        return known

    def gradient(self, wanted: tuple[bool, ...], given: tuple[bool, ...], tree: Any) -> _JaxCall:
        """The call that takes this one's arrays and the cotangents that are ``given``, and returns
        the gradients that are ``wanted``."""
        key = wanted, given, tree
        known = self._gradients.get(key)
        if known is None:
            pull = self._pull if self.vjp is None else self._given_pull

            def function(*arrays: Any) -> Any:
                primals, rest = arrays[: len(wanted)], iter(arrays[len(wanted) :])
                out = jax.tree.leaves(jax.eval_shape(self.function, *primals))
                # JAX's gradient by a complex value is the conjugate of torch's.
                cotangents = [
                    jnp.conj(next(rest)) if is_given else no_cotangent(o)
                    for is_given, o in zip(given, out, strict=True)
                ]
                pulled = pull(primals, wanted, jax.tree.unflatten(tree, cotangents))
                return [jnp.conj(gradient) for gradient in pulled]

            known = self._gradients[key] = _JaxCall(
                f"gradient of {self.name}", function, None, None
            )
        return known

    def _pull(self, primals: Sequence[Any], wanted: Sequence[bool], cotangent: Any) -> list[Any]:
        at = [i for i, w in enumerate(wanted) if w]

        def of_wanted(*some: Any) -> Any:
            arrays = list(primals)
            for i, x in zip(at, some, strict=True):
                arrays[i] = x
            return self.function(*arrays)

        _, pull = jax.vjp(of_wanted, *(primals[i] for i in at))
        return list(pull(cotangent))

    def _given_pull(
        self, primals: Sequence[Any], wanted: Sequence[bool], cotangent: Any
    ) -> list[Any]:
        assert self.vjp is not None
        gradients = self.vjp(primals, self.function(*primals), cotangent)
        if len(gradients) != len(primals):
            raise ValueError(
                f"the vjp of {self.name} returned {len(gradients)} gradients for {len(primals)} "
                "arrays; one per array, None where there is none"
            )
        chosen = []
        for x, gradient, is_wanted in zip(primals, gradients, wanted, strict=True):
            if not is_wanted:
                continue
            gradient = jnp.zeros_like(x) if gradient is None else jnp.asarray(gradient)
            if gradient.shape != x.shape:
                raise ValueError(
                    f"the vjp of {self.name} returned a gradient of shape {gradient.shape} for an "
                    f"array of shape {x.shape}"
                )
            chosen.append(gradient.astype(x.dtype))
        return chosen


def no_cotangent(out: Any) -> Any:
    """The cotangent of a result that nothing depends on, or that can't have any."""
    if jnp.issubdtype(out.dtype, jnp.inexact):
        return jnp.zeros(out.shape, out.dtype)
    return np.zeros(out.shape, jax.dtypes.float0)


# By number, which the operation carries, and which no other call ever gets. A call lives as long as
# its function or a gradient that needs it, and the latest ones longer: a batch may still run them.
_CALLS: Interned[int, _JaxCall] = Interned("calls of JAX functions", 256)
_numbers = itertools.count()


def _call(number: int) -> _JaxCall:
    call = _CALLS.get(number)
    assert call is not None, "a JAX function was called that is gone"
    return call


def name_of(number: int) -> str:
    """The name of the JAX function behind call ``number``."""
    return _call(number).name


@meta_of("xla_dtensor::jax_call")
def _shapes(arrays: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    _, outs = _call(call).structure(arrays)
    return [torch.empty(o.shape, dtype=to_torch_dtype(o.dtype), device="meta") for o in outs]


@lowers("xla_dtensor::jax_call")
def _lower(arrays: list[Any], call: int) -> list[Any]:
    return jax.tree.leaves(_call(call).run(*arrays))


def _rule(call: Call) -> str | None:
    return _call(call.args["call"]).rule


_rule.__doc__ = "the notation given to jax_function, if any"
register_rule("xla_dtensor::jax_call", _rule, kind="jax_function", where="rule= of xd.jax_function")


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _JaxCall, *tensors: Any) -> Any:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        # Each set of results that get a gradient has a backward call of its own (`gradient`), which
        # computes nothing for the others.
        ctx.set_materialize_grads(False)
        outs = tuple(torch.ops.xla_dtensor.jax_call(list(tensors), call.number))
        ctx.mark_non_differentiable(*filter(is_exact, outs))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        given = tuple(g is not None for g in grads)
        if not any(given):
            return (None,) * (1 + len(tensors))
        tree, _ = ctx.call.structure(tensors)
        gradient = ctx.call.gradient(wanted, given, tree)
        found = iter(
            _Differentiable.apply(gradient, *tensors, *(g for g in grads if g is not None))
        )
        return (None, *(next(found) if w else None for w in wanted))


def jax_function(
    function: Callable[..., Any],
    *,
    vjp: Callable[..., Any] | None = None,
    rule: str | None = None,
) -> Callable[..., Any]:
    """``function``, written in JAX, as a function of torch tensors.

    On per-device tensors each device runs it on its own value; on sharded tensors it sees the whole
    logical arrays, and XLA partitions it; on CPU tensors it runs on the "xla" device and the
    results come back. Gradients are JAX's (``jax.vjp``, so ``jax.custom_vjp`` works), of any order;
    backward computes the function again, which XLA shares with the first time in a compiled step.

    Args:
        function: takes arrays where the callable is given tensors, in any structure of tuples,
            lists and dicts, and returns such a structure of arrays. Other arguments are passed as
            they are, must be hashable, and each new value compiles anew. As with ``jax.jit``, what
            it reads besides (globals, attributes) is read when a call is first compiled. Numbers
            that it makes have JAX's default dtypes (``jnp.ones(3)`` is float32).
        vjp: the gradients, where JAX can't differentiate the function (a Pallas kernel) or
            shouldn't: ``vjp(arrays, out, cotangent)`` with the tuple of the arrays among the
            arguments, what ``function`` returned, and a cotangent of the same structure; returns a
            gradient or None per array, of the array's shape. It is written in JAX, with JAX's
            gradients by complex arrays: torch is given, and gives, their conjugates.
        rule: of sharded tensors, an einsum notation of the layouts ("b h, h o -> b o"); without it
            the compiler chooses the results' layouts.

    Returns:
        a callable, which returns ``function``'s results with tensors for arrays, of their shapes
        and dtypes: of the kind of its arguments, sharded tensors laid out as ``rule`` says.

    Raises:
        ValueError: (in backward) ``vjp`` returns gradients that don't fit.
        TypeError: (when called) no tensor among the arguments, an array that is none, or an
            argument that can't be hashed.
        LayoutRuleError: ``rule`` is malformed, or (when called) doesn't fit a call.

    Example::

        import jax, torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        swish = xd.jax_function(lambda x: x * jax.nn.sigmoid(x), rule="... -> ...")
        x = xd.distribute_tensor(torch.randn(8, 4), mesh, [xd.Shard(0)]).requires_grad_()
        y = swish(x)
        y.sum().backward()
        assert y.placements == x.grad.placements == (xd.Shard(0),)
    """
    if rule is not None:
        try:
            validate(rule)
        except ValueError as error:
            raise LayoutRuleError(f"jax_function(rule={rule!r}): {error}") from None
    name = getattr(function, "__name__", repr(function))
    calls: dict[Any, _JaxCall] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_tensor = tuple(isinstance(x, torch.Tensor) for x in leaves)
        static = tuple(None if t else x for x, t in zip(leaves, is_tensor, strict=True))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not tensors:
            raise TypeError(f"jax_function({name}) was called without a tensor")
        for x in static:
            if isinstance(x, jax.Array | np.ndarray):
                raise TypeError(
                    f"jax_function({name}) got an array of shape {x.shape} that is no torch "
                    "tensor; pass torch.from_numpy(...), or close over it"
                )
        key = tree, is_tensor, tuple(map(exact, static))
        try:
            call = calls.get(key)
        except TypeError as error:
            raise TypeError(
                f"jax_function({name}): arguments that are no tensors are part of the compiled "
                f"program's key, and must be hashable: {error}"
            ) from None
        if call is None:

            def of_arrays(*arrays: Any) -> Any:
                rest = iter(arrays)
                filled = [next(rest) if t else x for x, t in zip(static, is_tensor, strict=True)]
                own_args, own_kwargs = jax.tree.unflatten(tree, filled)
                return function(*own_args, **own_kwargs)

            call = calls[key] = _JaxCall(name, of_arrays, vjp, rule)
        on_host = not any(is_ours(x) for x in tensors)
        moved = [_on_device(x, name) for x in tensors]
        outs = _Differentiable.apply(call, *moved)
        if on_host:
            outs = tuple(o.cpu() for o in outs)
        return jax.tree.unflatten(call.structure(tensors)[0], outs)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = function.__doc__
    return run


def is_exact(tensor: torch.Tensor) -> bool:
    """Whether it is of integers or booleans, which have no gradient."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _on_device(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if is_ours(tensor):
        return tensor
    if tensor.device.type != "cpu":
        raise UnsupportedOpError(
            f"jax_function({name}) got a tensor of shape {list(tensor.shape)} on {tensor.device}; "
            "it takes xla and CPU tensors"
        )
    return tensor.to("xla")
