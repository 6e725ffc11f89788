"""Makes tensors of given forms; the one place that chooses their class."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from xla_dtensor.base import ours
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.storage import ONE_VIEWER, Storage
from xla_dtensor.forms.views import Step
from xla_dtensor.tensors.base import wrapper
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Ours: TypeAlias = XLAShardedTensor | XLATensor
"""The tensors of this package, in annotations."""

is_ours: Callable[[object], TypeIs[Ours]] = ours.is_ours  # type: ignore[assignment]
"""Whether a value is one of them. (Marked tensors and those of users' subclasses are, too.)"""


def tensor_class(form: Form) -> Any:
    """The tensor class that shows ``form``."""
    return XLAShardedTensor if form.mesh is not None else XLATensor


def new_tensor(array: Any, form: Form) -> Any:
    """A tensor with a storage of its own."""
    tensor = wrapper(XLAShardedTensor if form.mesh is not None else XLATensor, form)
    tensor._storage_ = storage = Storage(array, form)
    storage.viewers = ONE_VIEWER
    return tensor


def new_view(storage: Storage, form: Form, steps: tuple[Step, ...]) -> Any:
    """A further tensor of ``storage``, a view of it."""
    tensor = wrapper(XLAShardedTensor if form.mesh is not None else XLATensor, form)
    tensor._storage_ = storage
    tensor._steps = steps
    storage.add_viewer(tensor)
    return tensor


def of_storage(storage: Storage, form: Form) -> Any:
    """A tensor that shows ``storage`` as a whole."""
    return tensor_class(form)(storage, form)
