"""``python -m xla_dtensor.torchtitan --module llama3``: runs torchtitan's trainer.

What ``torchrun -m torchtitan.train`` does with one process per device, in one process for all of
them; all arguments are torchtitan's. On a machine without accelerators ``NGPU``, by which
torchtitan's own script says how many there are, is the number of simulated devices.
"""

from __future__ import annotations

import os

from xla_dtensor.runtime import xla_flags


def main() -> None:
    """Train.

    Raises:
        ModuleNotFoundError: torchtitan isn't installed.
    """
    for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)  # a launcher's, of several processes
    if "NGPU" in os.environ:
        own = int(os.environ["NGPU"]) // int(os.environ["WORLD_SIZE"])  # this process's
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(own))
    xla_flags.add(xla_flags.OWN_BFLOAT16_PRODUCTS)  # torchtitan's default is bfloat16
    from torchtitan import train

    train.main()


if __name__ == "__main__":
    main()
