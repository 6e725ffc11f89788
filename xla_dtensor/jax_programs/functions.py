"""`call`: torch functions on arrays of JAX's; what is taken apart, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
import torch

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.forms.form import Form
from xla_dtensor.jax_programs import differentiated
from xla_dtensor.jax_programs.differentiated import plain_form
from xla_dtensor.jax_programs.values import from_program, to_program, words_of


class FunctionOnTensors:
    """A torch function with its arguments, as code on a list of tensors (`differentiated.Code`).

    Args:
        function: what is called.
        args, kwargs: its arguments, in which arrays are to become tensors.

    Attributes:
        arrays: the arrays among them, until it runs: JAX keeps the code of a backward pass, which
            must not keep tracers.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._function = function
        leaves, self._tree = jax.tree.flatten((args, kwargs))
        self._leaves = leaves
        self._at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
        self.arrays = [leaves[i] for i in self._at]
        for i in self._at:
            leaves[i] = None
        self._rest: Any = None

    def form(self, index: int, array: Any) -> Form:
        return plain_form(array)

    def wants_gradient(self, index: int) -> bool | None:
        return None

    def within(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = list(self._leaves)
        for i, tensor in zip(self._at, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        return self.take_apart(self._function(*args, **kwargs))

    def take_apart(self, out: Any) -> list[torch.Tensor]:
        """The tensors of a result; the rest is kept for `put_together`."""
        known_to_jax(out)
        leaves, tree = pytree.tree_flatten(out)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in at]
        rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._rest = rest, at, tree
        return tensors

    def put_together(self, arrays: Sequence[Any]) -> Any:
        """The result with arrays in place of its tensors."""
        rest, at, tree = self._rest
        leaves = list(rest)
        for i, array in zip(at, arrays, strict=True):
            leaves[i] = array
        return pytree.tree_unflatten(leaves, tree)


def call(function: Callable[..., Any], *args: Any, rng: Any = None, **kwargs: Any) -> Any:
    """Call a torch function on arrays of JAX's, as part of a JAX program.

    The function is given tensors on the device "xla" for the arrays, and what it returns is arrays.
    It can be used under ``jax.jit``, ``jax.grad``, ``jax.vmap``, ``jax.lax.scan``,
    ``jax.shard_map``; not under ``jax.jvp`` and ``jax.jacfwd``. Its gradient is torch's, of any
    order: ``no_grad``, ``detach()``, the backward of an ``autograd.Function`` or a ``DFunction``
    mean what they mean in torch, and ``backward()`` inside is part of the program.

    A tensor that the function writes to is its own; arrays don't change. What it leaves in globals
    or attributes has no value afterwards, and raises where it is used.

    Args:
        function: of tensors, in any structure of tuples, lists and dicts; other arguments are
            passed as they are.
        args, kwargs: its arguments, with arrays for tensors. Where JAX has its 64-bit types off,
            int32 becomes int64, torch's type of indices, and 64-bit results become 32-bit ones.
        rng: a key of JAX's, if it draws random numbers. ``jax.random.key(seed)`` gives the numbers
            that ``torch.manual_seed(seed)`` gives on the device.

    Returns:
        the function's result, with arrays for tensors.

    Raises:
        RandomNumbersError: the function draws random numbers, and there is no ``rng``.
        DataDependentError: it needs a value in Python (``.item()``).
        UnsupportedOpError: it writes to a tensor from outside, or computes with a CPU tensor that
            requires grad.

    Example::

        import jax, jax.numpy as jnp, torch, xla_dtensor as xd

        def loss(x):
            return xd.jax.call(torch.nn.functional.softplus, x).sum()

        slope = jax.jit(jax.grad(loss))(jnp.zeros(3))
        assert slope.tolist() == [0.5, 0.5, 0.5]
    """
    return run(FunctionOnTensors(function, args, kwargs), rng)


def run(code: Any, key: Any) -> Any:
    """The result of ``code`` on its arrays."""
    enabled = jax.config.jax_enable_x64
    arrays = [to_program(jax.numpy.asarray(array)) for array in code.arrays]
    code.arrays = []
    words = None if key is None else words_of(key)
    with jax.enable_x64(True):
        results = differentiated.call(code, words, arrays)
        results = [from_program(array, enabled) for array in results]
    return code.put_together(results)


def known_to_jax(out: Any) -> None:
    """Tell JAX of containers that only torch's pytree knows (the outputs of Hugging Face's
    models)."""
    rest = [out]
    while rest:
        value = rest.pop()
        node = pytree.SUPPORTED_NODES.get(type(value))
        if node is None:
            continue
        if jax.tree_util.all_leaves([value]):
            jax.tree_util.register_pytree_node(type(value), *_as_jax_wants(type(value)))
        rest += node.flatten_fn(value)[0]


def _as_jax_wants(cls: type) -> tuple[Any, Any]:
    """How JAX takes a container of torch's pytree apart, and puts it together."""
    node = pytree.SUPPORTED_NODES[cls]

    def flatten(value: Any) -> Any:
        children, context = node.flatten_fn(value)
        return tuple(children), _Context(context)

    return flatten, lambda aux, children: node.unflatten_fn(list(children), aux.value)


class _Context:
    """A context of torch's pytree, which can't be hashed (a list of names)."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.value == other.value

    def __hash__(self) -> int:
        return hash(repr(self.value))
