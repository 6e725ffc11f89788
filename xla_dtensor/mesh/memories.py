"""The host's memory that devices address themselves (JAX's ``pinned_host``), for offloading."""

from __future__ import annotations

import jax

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.mesh.frame import Frame

HOST = "pinned_host"
"""JAX's name of it."""


def check_host_memory(frame: Frame | None, call: str, *, between: bool = True) -> None:
    """Raise unless the devices of ``frame`` (None: the default one) reach a memory of the host.

    Args:
        frame: whose devices.
        call: what wants it, for the message.
        between: whether arrays are to rest there between programs, and not within one alone.
            Descriptions of GPUs that aren't here say nothing of their memories: XLA's compiler
            takes arguments for those on the device, and copies within a program for what they are.

    Raises:
        UnsupportedOpError: they don't.
    """
    device = jax.devices()[0] if frame is None else frame.jax_mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds and (kinds or between):
        raise UnsupportedOpError(
            f"{call}: {device.device_kind} devices reach no memory of the host (JAX's "
            f"{HOST!r}; they have {', '.join(kinds)}); leave offloading out, and shard over more "
            "devices"
        )
