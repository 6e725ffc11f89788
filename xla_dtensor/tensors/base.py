"""`TensorMethods`, the base of both tensor classes: storage and view steps, autograd, indexing."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from xla_dtensor.base import epoch, executor, interrupts
from xla_dtensor.base.not_a_sequence import not_a_sequence
from xla_dtensor.base.ours import OurTensor, is_ours
from xla_dtensor.base.torch_private import (
    FakeTensor,
    disabled_torch_function,
    make_wrapper_subclass,
)
from xla_dtensor.errors import DataDependentError, UnsupportedOpError
from xla_dtensor.forms.read import read
from xla_dtensor.forms.storage import ONE_VIEWER
from xla_dtensor.forms.views import CrossingStep
from xla_dtensor.tensors import indexing
from xla_dtensor.tensors.attributes import OWN_ATTRIBUTES, dict_of_tensor, set_attributes
from xla_dtensor.tensors.backend import backend
from xla_dtensor.tensors.memory import HasMemory
from xla_dtensor.tensors.printing import has_text
from xla_dtensor.tensors.saved_leaves import moves
from xla_dtensor.tensors.saving import reduce_tensor

if TYPE_CHECKING:
    import jax
    import numpy as np

    from xla_dtensor.forms.form import Form
    from xla_dtensor.forms.storage import Storage
    from xla_dtensor.forms.views import Step


# What `isinstance` asks a tensor for where the class is `nn.Parameter` or `nn.Buffer`.
CLASS_OF_TENSOR = frozenset({"_is_param", "_is_buffer"})


_DEVICE = torch.device("xla:0")
_META = torch.device("meta")
_make_wrapper: Callable[..., Any] = make_wrapper_subclass
_requires_grad: Any = torch.Tensor.requires_grad
_grad: Any = torch.Tensor.grad
grad_of_tensor: Callable[[torch.Tensor], torch.Tensor | None] = _grad.__get__
"""A tensor's ``.grad``, which a step that is traced has not asked for."""
requires_grad_of_tensor: Callable[[torch.Tensor], bool] = _requires_grad.__get__
"""``tensor.requires_grad``, without a call in Python."""
set_grad_of_tensor: Callable[[torch.Tensor, torch.Tensor | None], None] = _grad.__set__
"""Assign to ``tensor.grad`` likewise."""


def grad_of(leaf: Any) -> Any:
    """The same of what may also be no tensor, but acts as one (`fully_shard`'s sums)."""
    return grad_of_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf.grad


def set_grad_of(leaf: Any, grad: Any) -> None:
    """Assign to it likewise."""
    if isinstance(leaf, torch.Tensor):
        _grad.__set__(leaf, grad)
    else:
        leaf.grad = grad


@functools.cache
def _dispatcher() -> Callable[..., Any]:
    return backend().dispatch


@functools.lru_cache(maxsize=1024)
def computes_itself(cls: type) -> bool:
    """Whether ``cls`` is a subclass of ``torch.Tensor`` that is not ours and computes operations
    itself, also those with a tensor of ours among the arguments. `DTensor` and `FakeTensor` refuse
    those; we do, and say more."""
    dispatch = getattr(cls, "__torch_dispatch__", torch.Tensor.__torch_dispatch__)
    return dispatch is not torch.Tensor.__torch_dispatch__ and not issubclass(
        cls, OurTensor | DTensor | FakeTensor
    )


def refuse_other_kind(tensor: TensorMethods, other: Any, what: str) -> None:
    """Raise if ``tensor`` is sharded and ``other`` isn't, or the other way round."""
    if is_ours(other) and tensor._form.is_sharded != other._form.is_sharded:
        own, wanted = ("sharded" if x._form.is_sharded else "per-device" for x in (tensor, other))
        raise UnsupportedOpError(
            f"{what}: a {own} tensor can't become a {wanted} one; convert the other one first with "
            "DTensor.from_local(x, mesh, placements) or x.to_local()"
        )


def wrapper(cls: Any, form: Form, requires_grad: bool = False) -> Any:
    """A tensor of ``cls`` that has no storage yet."""
    r = _make_wrapper(  # by position, which takes torch less time than by name
        cls,
        form.shape,
        form.stride,
        form.offset,
        None,
        form.dtype,
        torch.strided,
        _META if form.meta else _DEVICE,
        False,
        requires_grad,
    )
    r._own_form = form
    if form.spec is not None:
        r._spec = form.spec
    return r


class TensorMethods(HasMemory, OurTensor):
    """Methods of both views. The data is ``_storage_`` seen through ``_steps``."""

    _storage_: Storage
    _steps: tuple[Step, ...] = ()
    _own_form: Form
    _xla_cache: Any = None
    _xla_alive: Any = None  # what tells the storage that the tensor exists, see forms/storage.py

    @staticmethod
    def __new__(
        cls: Any,
        storage: Storage,
        form: Form,
        steps: tuple[Step, ...] = (),
        requires_grad: bool = False,
    ) -> Any:
        r = wrapper(cls, form, requires_grad)
        r._storage_ = storage
        if steps:
            r._steps = steps
        if storage.viewers is None:
            storage.viewers = ONE_VIEWER
        else:
            storage.add_viewer(r)
        return r

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything happens in ``__new__``; ``DTensor.__init__`` wants other arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        not_a_sequence(cls)

    __torch_function__ = disabled_torch_function
    __dict__ = property(dict_of_tensor.__get__, set_attributes)

    @classmethod
    @interrupts.atomic
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and any(map(computes_itself, types)):
            return NotImplemented  # torch asks that class next
        return _dispatcher()(func, args, kwargs or {})

    def __format__(self, format_spec: str) -> str:
        """As of torch's own tensors: one element is formatted as the number that it is; what has no
        number (now) as `repr` has it, unless it is to be formatted in a certain way."""
        if not self._form.meta and not self._form.shape:
            frame = sys._getframe(1)
            known = has_text(self, frame)
            if known or (format_spec and known is not None):
                return format(self.detach().item(), format_spec)  # type: ignore[attr-defined]
            printed = executor.current().printed_text(self, frame, format_spec)
            if printed is not None:
                return printed
            format_spec = ""
        return object.__format__(self, format_spec)

    def __getitem__(self, index: Any) -> Any:
        if indexing.is_of_numbers(index):
            return torch.Tensor.__getitem__(self, index)
        index = indexing.of_lists(index)
        result = indexing.select(self, index)
        return torch.Tensor.__getitem__(self, index) if result is NotImplemented else result

    def __setitem__(self, index: Any, value: Any) -> None:
        index = indexing.of_lists(index)
        if not indexing.assign(self, index, value):
            torch.Tensor.__setitem__(self, index, value)

    @property
    def _form(self) -> Form:
        """The tensor's current physical form."""
        form = self._storage_.form
        if not self._steps:
            return form
        if self._own_form.varying != form.varying and not any(
            isinstance(step, CrossingStep) for step in self._steps
        ):  # since a write to the storage
            self._own_form = self._own_form.placed(form.frame).with_varying(form.varying)
        return self._own_form

    @property
    def data(self) -> Any:
        """The tensor without autograd, on the same storage: torch's ``data``. Assigning to it makes
        the tensor another view of the assigned one's storage, as in torch; one that is sharded may
        get another mesh and other placements so.

        Raises:
            RuntimeError: the assigned tensor is of another kind (on the CPU).
            UnsupportedOpError: one of them is sharded and the other isn't.

        Example::

            import torch, xla_dtensor as xd

            x = torch.ones(3, device="xla", requires_grad=True)
            x.data.add_(1)
            assert x.tolist() == [2, 2, 2] and not x.data.requires_grad
            x.data = torch.zeros(3, device="xla")
            assert x.tolist() == [0, 0, 0]
        """
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        refuse_other_kind(self, value, "an assignment to .data")
        executor.current().moves(self, value)
        self._become(value)

    @property
    def requires_grad(self) -> bool:
        """Whether operations on the tensor are recorded for ``backward()``, a bool; may be
        assigned.

        Example::

            import torch, xla_dtensor as xd

            x = torch.ones(3, device="xla")
            x.requires_grad = True
            assert (x * 2).requires_grad
        """
        return requires_grad_of_tensor(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def grad(self) -> Any:
        """The gradient that backward passes have added up, a tensor of the same layout or None:
        torch's ``grad``; may be assigned and deleted.

        Raises:
            RuntimeError, TypeError: as in torch: what is assigned has another shape or dtype.

        Example::

            import torch, xla_dtensor as xd

            x = torch.ones(3, device="xla", requires_grad=True)
            (x * 2).sum().backward()
            assert x.grad.tolist() == [2, 2, 2]
            x.grad = None
        """
        executor.current().reads_grad(self)
        return grad_of_tensor(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        executor.current().sets_grad(self)
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Start or stop recording: torch's ``requires_grad_``.

        Args:
            requires_grad: whether to record.

        Returns:
            the tensor itself.

        Raises:
            RuntimeError: as in torch: an integer tensor, or False for one that is no leaf.

        Example::

            import torch, xla_dtensor as xd

            x = torch.ones(3, device="xla").requires_grad_()
            x.sum().backward()
            assert x.grad.tolist() == [1, 1, 1]
        """
        epoch.tensors.moved()
        return torch.Tensor.requires_grad_(self, requires_grad)

    def detach_(self) -> Any:
        """Forget the tensor's history, in place: torch's ``detach_``.

        Returns:
            the tensor itself, now a leaf.

        Example::

            import torch, xla_dtensor as xd

            x = torch.ones(3, device="xla", requires_grad=True) * 2
            assert x.detach_() is x and x.is_leaf and not x.requires_grad
        """
        epoch.tensors.moved()
        return torch.Tensor.detach_(self)

    @interrupts.atomic
    def _become(self, value: Any) -> None:
        epoch.tensors.moved()
        moves(self)
        torch.Tensor.data.__set__(self, value)
        if is_ours(value):  # torch moved its own part alone
            value._storage_.introduce(value)
            self._storage_, self._steps = value._storage_, value._steps
            self._own_form, self._xla_cache = value._own_form, None
            self._storage_.add_viewer(self)
            self._has_become()

    def _has_become(self) -> None:
        """The tensor is a view of other memory now."""

    @property
    def jax_array(self) -> jax.Array:
        """The tensor's ``jax.Array`` in its physical form: before the tensor's own dims one for
        each mesh axis along which devices hold values of their own, and dims that don't divide
        padded to equal blocks (of a dim that several mesh dims cut ``local_shards`` may then say
        other pieces, torch's). Read-only. A compiled step that overwrites the tensor deletes the
        array, as ``jax.jit`` does.

        Example::

            import jax, torch, xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
            x = xd.distribute_tensor(torch.ones(8, 4), mesh, [xd.Shard(0)])
            assert isinstance(x.jax_array, jax.Array) and x.jax_array.shape == (8, 4)
            assert x.jax_array.sharding.spec[0] == "dp"
        """
        return read(self)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The full value as a NumPy array on the host, a copy of the tensor's shape.

        Args:
            force: detach it first.

        Raises:
            RuntimeError: the tensor requires grad and ``force`` is not set, as in torch.
            PerDeviceValueError: the devices' values differ.
            TypeError: NumPy has no such dtype (bfloat16), as in torch.

        Example::

            import torch, xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
            x = xd.distribute_tensor(torch.ones(8, 4), mesh, [xd.Shard(0)])
            assert x.numpy().shape == (8, 4) and x.numpy().sum() == 32
        """
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on a tensor that requires grad: use tensor.detach().numpy()"
            )
        return self.detach().cpu().numpy()  # type: ignore[attr-defined]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        try:
            array = self.numpy()
        except DataDependentError as error:
            raise DataDependentError(
                f"{error}\nIt is a NumPy array next to the tensor, or a function of NumPy's, that "
                "asks: float(array) of one number and torch.as_tensor(array) can be computed with"
            ) from error
        return array if dtype is None else array.astype(dtype, copy=False)

    def _buffer(self) -> Any:
        """The one array on one device that has the whole value."""
        array = backend().to_jax(self)
        if len(array.sharding.device_set) == 1:
            return array
        if not array.is_fully_replicated:
            raise BufferError(
                f"DLPack of a tensor that lies on several devices ({self._form}): it has no one "
                "buffer; take full_tensor(), or .cpu(), first"
            )
        return array.addressable_shards[0].data

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._buffer().__dlpack__(**{k: v for k, v in kwargs.items() if v is not None})

    def __dlpack_device__(self) -> Any:
        return self._buffer().__dlpack_device__()

    def tolist(self) -> Any:
        """The full value as nested Python lists; a Python number if the tensor has no dims.

        Raises:
            PerDeviceValueError: the devices' values differ.

        Example::

            import torch, xla_dtensor as xd

            assert torch.ones(2, 2, device="xla").tolist() == [[1.0, 1.0], [1.0, 1.0]]
        """
        return self.detach().cpu().tolist()  # type: ignore[attr-defined]

    def _copy(self) -> Any:
        """A tensor of its own with the same value and layout; below autograd."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:  # type: ignore[attr-defined]
            raise RuntimeError(
                "only tensors created by the user (graph leaves) support deepcopy; "
                "detach() this one first"
            )
        with torch.no_grad():
            result = self._copy()
        memo[id(self)] = result
        result.requires_grad_(self.requires_grad)
        for name, value in self.__dict__.items():
            if name not in OWN_ATTRIBUTES:
                setattr(result, name, copy.deepcopy(value, memo))
        # torch's parameters leave theirs behind; those that are DTensors take it along.
        leaves_grad = isinstance(self, torch.nn.Parameter) and self._form.placements is None
        if self.grad is not None and not leaves_grad:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_tensor(self, OWN_ATTRIBUTES)
