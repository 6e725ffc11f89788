"""``python -m xla_dtensor.torchtitan --module llama3 --config llama3_debugmodel ...``

What ``torchrun -m torchtitan.train`` does with one process per device, in one process for all of
them; all arguments are torchtitan's. On a machine without accelerators ``NGPU``, by which
torchtitan's own script says how many there are, is the number of simulated devices.
"""

from __future__ import annotations

import importlib.metadata
import os

# XLA's CPU backend leaves some products of bfloat16 to a library that then doesn't take them
# ("Unsupported element type for DotThunk: BF16 x BF16 = F32"). torchtitan's default is bfloat16.
_WITHOUT_LIBRARY = "--xla_cpu_experimental_ynn_fusion_type="
_VERSIONS_WITH_IT = ("0.10.",)  # XLA ends the process at flags that it doesn't know


def main() -> None:
    """Train.

    Raises:
        ModuleNotFoundError: torchtitan isn't installed.
    """
    for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)  # a launcher's, of several processes
    if "NGPU" in os.environ:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", os.environ["NGPU"])
    flags = os.environ.get("XLA_FLAGS", "")
    if importlib.metadata.version("jaxlib").startswith(_VERSIONS_WITH_IT) and "ynn" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_WITHOUT_LIBRARY}".strip()
    from torchtitan import train

    train.main()


if __name__ == "__main__":
    main()
