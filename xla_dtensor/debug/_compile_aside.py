"""A program: compiles the StableHLO that it reads from standard input for as many simulated CPU
devices as it is told, and prints what XLA has made of it. XLA's warnings go to standard error.
`_rematerializations.py` runs it.
"""

import sys

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir


def main(count: int) -> None:
    """Compile for ``count`` devices."""
    with mlir.make_ir_context() as context:
        module = ir.Module.parse(sys.stdin.read(), context)
        order = np.arange(count).reshape(1, count)
        options = compiler.get_compile_options(1, count, device_assignment=order)
        client = jax.devices()[0].client
        devices = xla_client.DeviceList(tuple(jax.devices()[:count]))
        executable = compiler.backend_compile_and_load(client, module, devices, options, [])
    print(executable.hlo_modules()[0].to_string())


if __name__ == "__main__":
    main(int(sys.argv[1]))
