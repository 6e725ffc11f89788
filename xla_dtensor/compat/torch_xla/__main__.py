"""``python -m xla_dtensor.compat.torch_xla program.py``: runs an unchanged torch_xla program.

Arguments follow the program's name; ``-m package.module`` runs a module.

``PJRT_DEVICE`` and ``CPU_NUM_DEVICES`` mean what they mean to torch_xla.
"""

from __future__ import annotations

import os
import runpy
import sys

import jax

from xla_dtensor.compat.torch_xla import installing, runtime


def main() -> None:
    """Run the program.

    Raises:
        SystemExit: none is named.
        SpmdError: the real torch_xla is installed.
    """
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments:
        raise SystemExit("usage: python -m xla_dtensor.compat.torch_xla program.py [arguments]")
    installing.install()
    platform, count = os.environ.get("PJRT_DEVICE"), os.environ.get("CPU_NUM_DEVICES")
    if platform and "JAX_PLATFORMS" not in os.environ:
        runtime.set_device_type(platform)
    if count and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", int(count))
    sys.argv = arguments
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
