"""Tensors by their form: the one place that says which class shows which."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from xla_dtensor.forms.form import Form
from xla_dtensor.forms.storage import ONE_VIEWER, Storage
from xla_dtensor.tensors.base import DEVICE, META, make_wrapper
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

Ours: TypeAlias = XLAShardedTensor | XLATensor
"""The tensors of this package."""


def tensor_class(form: Form) -> Any:
    """The tensor class that shows ``form``."""
    return XLAShardedTensor if form.mesh is not None else XLATensor


def new_tensor(array: Any, form: Form) -> Any:
    """A tensor with a storage of its own."""
    # As `TensorMethods.__new__` does, of which this is the usual case: most operations come here.
    cls: Any = XLAShardedTensor if form.mesh is not None else XLATensor
    tensor = make_wrapper(
        cls,
        form.shape,
        form.stride,
        form.offset,
        None,
        form.dtype,
        torch.strided,
        META if form.meta else DEVICE,
    )
    tensor._storage_ = storage = Storage(array, form)
    tensor._own_form = form
    storage.viewers = ONE_VIEWER
    if form.spec is not None:
        tensor._spec = form.spec
    return tensor


def of_storage(storage: Storage, form: Form) -> Any:
    """A tensor that shows ``storage`` as a whole."""
    return tensor_class(form)(storage, form)
