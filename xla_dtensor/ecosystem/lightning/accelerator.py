"""The accelerator "xla", for Lightning's registries."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.ecosystem.device_choice import refuse_processes
from xla_dtensor.runtime import memory


class XlaAccelerator:
    """The methods; Lightning has a base class in each of its packages (`class_over`)."""

    def setup_device(self, device: torch.device) -> None:
        """Look at the device that a strategy has.

        Raises:
            ValueError: it is another one.
            UnsupportedOpError: this is one of several processes.
        """
        if device.type != "xla":
            raise ValueError(
                f"Lightning's accelerator 'xla' with a strategy on {device}: leave strategy out, "
                "or give 'xla_fully_shard'"
            )
        refuse_processes("Lightning")

    def setup(self, trainer: Any) -> None:
        """Nothing is to be done for a Trainer."""

    def teardown(self) -> None:
        """Nothing is held."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """What the device says of its memory."""
        return dict(memory.stats())

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """How many devices ``Trainer(devices=...)`` means.

        Raises:
            ValueError: it isn't the number of the first so many.
        """
        if isinstance(devices, str) and devices.strip().isdigit():
            devices = int(devices)
        if isinstance(devices, list | tuple) and list(devices) == list(range(len(devices))):
            devices = len(devices)
        if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
            raise ValueError(
                f"devices={devices!r} with accelerator 'xla': it is how many, the first ones; a "
                "strategy of 'xla_fully_shard' takes all where it is left out"
            )
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The devices as Lightning counts them; to torch they are one."""
        return [torch.device("xla", 0)] * XlaAccelerator.parse_devices(devices)

    @staticmethod
    def auto_device_count() -> int:
        """How many are used where nothing is said."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """There is a device, if only a simulated one."""
        return True

    @staticmethod
    def name() -> str:
        """As in ``accelerator="xla"``."""
        return "xla"


def class_over(base: type) -> type:
    """The class for one of Lightning's packages.

    Args:
        base: its own class of accelerators.
    """
    return type("XlaAccelerator", (XlaAccelerator, base), {"__module__": __name__})
