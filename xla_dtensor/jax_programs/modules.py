"""`from_module`: a torch module as parameters and a pure function for JAX."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch
from torch import nn

from xla_dtensor.base import executor, thread_state
from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.base.torch_private.attributes import (
    hooks_after_accumulation,
    hooks_of_tensor,
    make_parameter,
)
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, sharded_form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.jax_programs.differentiated import plain_form
from xla_dtensor.jax_programs.functions import FunctionOnTensors, run
from xla_dtensor.jax_programs.names import NamedTensors
from xla_dtensor.jax_programs.program_trace import ProgramTrace, share_memory
from xla_dtensor.jax_programs.swapped import swapped
from xla_dtensor.movement.jax_arrays import to_jax
from xla_dtensor.tensors.of_form import is_ours


def from_module(module: nn.Module) -> tuple[dict[str, Any], ModuleFunction]:
    """A torch module as its parameters and a pure function of them.

    Example::

        import jax, jax.numpy as jnp, torch, xla_dtensor as xd

        params, apply = xd.jax.from_module(torch.nn.Linear(4, 2))

        @jax.jit
        def loss(params, x):
            return (apply(params, x) ** 2).mean()

        gradients = jax.grad(loss)(params, jnp.ones((8, 4)))
        assert gradients["weight"].shape == (2, 4)

    Args:
        module: on the CPU, on xla devices (sharded on a mesh, too), or on the meta device. It is
            read again whenever JAX traces, its parameters' and buffers' values excepted, and left
            as it was.

    Returns:
        ``params``: copies of the parameters by name, tied ones once, sharded as they are; of a
        module on the meta device ``jax.ShapeDtypeStruct``s. And `ModuleFunction`, which calls it.

    Raises:
        TypeError: it is no module.
        UnsupportedOpError: a parameter has no value yet (``nn.LazyLinear``), or is a partial sum.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"xd.jax.from_module: a module is wanted, got {type(module).__name__}")
    names = NamedTensors(module)
    params = {name: _value(name, p) for name, p in names.parameters.items()}
    buffers = {name: _value(name, b) for name, b in names.buffers.items()}
    return params, ModuleFunction(module, buffers)


class ModuleFunction:
    """A torch module as a pure function: ``apply(params, *args)``. Made by `from_module`.

    Attributes:
        buffers: the values of the module's buffers when it was made, by name.

    Example::

        import jax, jax.numpy as jnp, torch, xla_dtensor as xd

        params, apply = xd.jax.from_module(torch.nn.BatchNorm1d(3))

        @jax.jit
        def run(params, buffers, x):
            return apply({**params, **buffers}, x, train=True, mutable=True)

        out, buffers = run(params, apply.buffers, jnp.ones((4, 3)))
        assert int(buffers["num_batches_tracked"]) == 1
    """

    def __init__(self, module: nn.Module, buffers: dict[str, Any]) -> None:
        self._module = module
        self.buffers = buffers

    def __call__(
        self,
        params: Mapping[str, Any],
        *args: Any,
        rng: Any = None,
        train: bool | None = None,
        mutable: bool = False,
        method: str = "forward",
        **kwargs: Any,
    ) -> Any:
        """Call the module; see `call` for what holds of functions.

        Args:
            params: an array for each parameter; those of buffers may be among them, in place of
                the values that `buffers` has: ``apply({**params, **buffers}, x)``. By parameters
                that don't require grad there is no gradient, nor by buffers, as in torch.
            args, kwargs: of the module, with arrays for tensors.
            rng: a key of JAX's, if it draws random numbers (dropout).
            train: call it in training or evaluation mode; None: as it stands.
            mutable: return the buffers, too, as the call has left them.
            method: the method to call.

        Returns:
            the result, or with ``mutable`` the result and a dict of all buffers.

        Raises:
            KeyError: an array is missing, or belongs to nothing.
            RandomNumbersError: it draws random numbers, and there is no ``rng``.
            UnsupportedOpError: it changes a buffer without ``mutable``, or a parameter.
        """
        values = {**self.buffers, **params}
        function = getattr(self._module, method) if method != "forward" else self._module
        with thread_state.tracing:  # no other thread has the module's tensors swapped
            names = NamedTensors(self._module)
            names.check(params, values)
            code = _Call(self._module, names, values, function, args, kwargs, train, mutable)
        return run(code, rng)

    def __repr__(self) -> str:
        return f"<{type(self._module).__name__} as a JAX function>"


class _Call(FunctionOnTensors):
    """One call of a module, as code on the tensors of its parameters, its buffers, and arguments.

    Args:
        module, names: the module, and what its tensors are called.
        values: an array for each.
        function, args, kwargs: what is called.
        train, mutable: as `ModuleFunction` has them.
    """

    def __init__(
        self,
        module: nn.Module,
        names: NamedTensors,
        values: Mapping[str, Any],
        function: Any,
        args: Any,
        kwargs: Any,
        train: bool | None,
        mutable: bool,
    ) -> None:
        super().__init__(function, args, kwargs)
        self._module, self._names = module, names
        self._train, self._mutable = train, mutable
        self._own = [*names.parameters.items(), *names.buffers.items()]
        self.arrays = [*(values[name] for name, _ in self._own), *self.arrays]
        self._checked_requires = [t.requires_grad for _, t in self._own]

    def form(self, index: int, array: Any) -> Form:
        if index >= len(self._own):
            return plain_form(array)
        name, tensor = self._own[index]
        mesh = tensor._form.mesh if is_ours(tensor) else None
        if mesh is None:
            return plain_form(array)
        if tuple(array.shape) != tuple(tensor.shape):
            raise UnsupportedOpError(
                f"params[{name!r}] has shape {list(array.shape)}; the module has it on {mesh!r} "
                f"with shape {list(tensor.shape)}, and such a tensor is given as a whole"
            )
        plain = plain_form(array)
        placements = tensor._form.placements
        return sharded_form(mesh, placements, tuple(array.shape), dtype=plain.dtype)

    def wants_gradient(self, index: int) -> bool | None:
        return self._checked_requires[index] if index < len(self._own) else None

    @contextmanager
    def within(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        own = tensors[: len(self._own)]
        trace = executor.current()
        assert isinstance(trace, ProgramTrace)
        with swapped(self._module, [t for _, t in self._own], own, self._train) as left:
            trace.replaced = self._own
            yield
        if left:
            warnings.warn(
                f"the module {type(self._module).__name__} has left tensors in {', '.join(left)}: "
                "they belong to the JAX program that is traced, and what was there before has been "
                "put back; return them from forward(), or make them buffers (mutable=True)",
                UserWarning,
                stacklevel=2,
            )

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        count = len(self._own)
        own = tensors[:count]
        for (_, old), new in zip(self._own, own, strict=True):
            _adopt(new, old)
        before = [t._storage_.version for t in own]
        outs = super().run(tensors[count:])
        buffers = NamedTensors(self._module).buffers
        changed = [
            name
            for (name, _), tensor, version in zip(self._own, own, before, strict=True)
            if tensor._storage_.version != version
            or (name in self._names.buffers and buffers.get(name) is not tensor)
        ]
        self._check(changed, buffers)
        if not self._mutable:
            return outs
        return [*outs, *(buffers[name] for name in self._names.buffers)]

    def _check(self, changed: list[str], buffers: dict[str, torch.Tensor]) -> None:
        kind = type(self._module).__name__
        if written := [name for name in changed if name in self._names.parameters]:
            raise UnsupportedOpError(
                f"{kind} writes to its parameters {', '.join(written)}: params are the caller's, "
                "and don't change; make what changes a buffer (mutable=True returns those)"
            )
        if other := set(buffers) ^ set(self._names.buffers):
            raise UnsupportedOpError(
                f"{kind} adds or removes buffers when it is called: {', '.join(sorted(other))}; a "
                "JAX program needs them from the start"
            )
        old = dict(self._own)
        for name in changed:
            if beside := [n for n, t in self._own if n != name and share_memory(t, old[name])]:
                raise UnsupportedOpError(
                    f"{kind} changes its buffer {name}, whose memory {', '.join(beside)} has, too: "
                    "as arrays they are apart, and what is written to one isn't seen in the other; "
                    "register one of them, and make the other of it where it is used"
                )
        if changed and not self._mutable:
            raise UnsupportedOpError(
                f"{kind} changes its buffers {', '.join(changed)}, which would be lost: "
                "result, buffers = apply({**params, **buffers}, ..., mutable=True) returns them"
                + (
                    "; or call it with train=False"
                    if self._train is not False and self._module.training
                    else ""
                )
            )

    def put_together(self, arrays: Sequence[Any]) -> Any:
        if not self._mutable:
            return super().put_together(arrays)
        count = len(self._names.buffers)
        first = len(arrays) - count
        buffers = dict(zip(self._names.buffers, arrays[first:], strict=True))
        return super().put_together(arrays[:first]), buffers


def _adopt(new: Any, old: Any) -> None:
    """Let a tensor pass for the parameter that it stands for: its class, hooks, attributes."""
    if isinstance(old, nn.Parameter):
        make_parameter(new)
    for hook in (hooks_of_tensor(old) or {}).values():
        if new.requires_grad:
            new.register_hook(hook)
    if new.requires_grad and hooks_after_accumulation(old):
        new.register_hook(_refuse_accumulated)
    known = vars(new)
    known.update({k: v for k, v in vars(old).items() if k not in known and k[:1] != "_"})


def _refuse_accumulated(gradient: Any) -> NoReturn:
    raise UnsupportedOpError(
        "a gradient by a parameter with a hook of register_post_accumulate_grad_hook: JAX's "
        "gradients are in no parameter's .grad, which such hooks look at; remove it, or change the "
        "gradient by register_hook"
    )


def _value(name: str, tensor: torch.Tensor) -> Any:
    """A copy of a parameter or buffer as JAX has arrays."""
    if nn.parameter.is_lazy(tensor):
        raise UnsupportedOpError(f"{name} has no shape yet (a lazy module): call the module first")
    dtype = jax.dtypes.canonicalize_dtype(to_jax_dtype(tensor.dtype))
    if tensor.device.type == "meta" or (is_ours(tensor) and tensor.is_meta):
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)
    with torch.no_grad():
        if not is_ours(tensor):
            return jnp.array(to_numpy(tensor.detach()))
        if tensor._form.unreduced:
            raise UnsupportedOpError(
                f"{name} is a sum that is still to be done ({list(tensor.placements)}): "
                "redistribute it first"
            )
        value = to_jax(tensor.detach())
        # A copy: JAX programs may be given it to overwrite (donate_argnums).
        with jax.enable_x64(True):
            return jnp.copy(value) if value.dtype == dtype else value.astype(dtype)
