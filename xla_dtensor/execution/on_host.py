"""The values of tensors on the host: copies to the CPU, numbers, printing."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base import assertions
from xla_dtensor.errors import PerDeviceValueError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import fetch, from_numpy, to_host
from xla_dtensor.forms.read import logical_value, read, reading
from xla_dtensor.runtime import arrays

ON_HOST = "its value on the host (.cpu(), .item(), printing, ...)"


def on_host(tensor: Any) -> torch.Tensor:
    """The value of a tensor that has one, as a CPU tensor.

    Raises:
        PerDeviceValueError: it differs from device to device.
    """
    form: Form = tensor._form
    if form.has_own_value:
        assertions.look()
        with reading(tensor) as array:  # of this process's one device
            (shard,) = array.addressable_shards
            return from_numpy(arrays.get(shard.data).reshape(form.shape))
    refuse_varying(form, ON_HOST)
    assertions.look()
    arrays.about_to_read(tensor._storage_.array, f"a tensor of shape {list(form.shape)}")
    with reading(tensor, logical_value if form.unreduced else read) as array:
        # Padding is cut off here: on the devices that would be a program per shape.
        return to_host(fetch(array, form.shape))


def refuse_varying(form: Form, what: str) -> None:
    """Raise if the tensor's values differ from device to device, so that ``what`` would, too."""
    if form.varying:
        raise PerDeviceValueError(
            f"a per-device tensor of shape {list(form.shape)} varies along {list(form.varying)}: "
            f"{what} would differ from device to device. Look at .local_values() (one CPU tensor "
            "per device), or make it one value first: DTensor.from_local(x, mesh, placements)"
            ".full_tensor(), or a collective (all_reduce, all_gather_tensor)"
        )
