"""``import torch_xla`` finds this package."""

from __future__ import annotations

import importlib.util
import sys

from xla_dtensor.compat import torch_xla
from xla_dtensor.compat.torch_xla import (  # noqa: F401  (all that a program may import)
    _XLAC,
    amp,
    runtime,
)
from xla_dtensor.compat.torch_xla.core import xla_env_vars, xla_model  # noqa: F401
from xla_dtensor.compat.torch_xla.debug import metrics, profiler  # noqa: F401
from xla_dtensor.compat.torch_xla.distributed import (  # noqa: F401
    fsdp,
    parallel_loader,
    spmd,
    xla_multiprocessing,
)
from xla_dtensor.compat.torch_xla.distributed.fsdp import utils as fsdp_utils  # noqa: F401
from xla_dtensor.compat.torch_xla.distributed.fsdp import wrap  # noqa: F401
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.compat.torch_xla.experimental import (  # noqa: F401
    distributed_checkpoint,
    scan,
    scan_layers,
    spmd_fully_sharded_data_parallel,
)
from xla_dtensor.compat.torch_xla.utils import checkpoint, utils  # noqa: F401

_NAME = "torch_xla"


def install() -> None:
    """Let ``import torch_xla``, and what is below it, find `xla_dtensor.compat.torch_xla` in this
    process. ``distribute_tensor`` and ``distribute_module`` of torch then shard in place on xla
    meshes, as with torch_xla.

    Raises:
        SpmdError: the real torch_xla is installed.

    Example::

        from xla_dtensor.compat.torch_xla.installing import install

        install()
        import torch_xla.distributed.spmd as xs

        assert xs.get_1d_mesh("data").axis_names == ("data",)
    """
    if sys.modules.get(_NAME) is torch_xla:
        return
    if _NAME in sys.modules or importlib.util.find_spec(_NAME) is not None:
        raise SpmdError(
            "torch_xla itself is installed, and would own the xla device, too: uninstall it (pip "
            "uninstall torch_xla), or import xla_dtensor.compat.torch_xla under its own name"
        )
    own = torch_xla.__name__
    for name, module in list(sys.modules.items()):
        if name == own or name.startswith(own + "."):
            sys.modules[_NAME + name[len(own) :]] = module
