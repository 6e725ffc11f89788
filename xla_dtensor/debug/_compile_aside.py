"""A program that compiles StableHLO from standard input for simulated CPU devices.

It prints what XLA has made of it; XLA's warnings go to standard error. `_rematerializations.py`
runs it.
"""

import sys

import jax
import numpy as np
from jax.extend.backend import get_compile_options
from jax.interpreters import mlir
from jaxlib import xla_client


def main(count: int) -> None:
    """Compile for ``count`` devices."""
    with mlir.make_ir_context() as context:
        module = mlir.ir.Module.parse(sys.stdin.read(), context)
        order = np.arange(count).reshape(1, count)
        options = get_compile_options(1, count, device_assignment=order)
        client = jax.devices()[0].client
        devices = xla_client.DeviceList(tuple(jax.devices()[:count]))
        executable = client.compile_and_load(
            module, executable_devices=devices, compile_options=options
        )
    print(executable.hlo_modules()[0].to_string())


if __name__ == "__main__":
    main(int(sys.argv[1]))
