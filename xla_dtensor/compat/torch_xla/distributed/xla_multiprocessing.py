"""``spawn``: one process drives all devices, so the function is called in this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xla_dtensor.compat.torch_xla import runtime


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Call ``fn(index, *args)``, with the number of this process, in this process.

    Args:
        fn: the program.
        args: its other arguments.
        nprocs, join, daemon, start_method: torch_xla's; no effect. A launcher starts several
            processes (`docs/several_processes.md`).
    """
    fn(runtime.process_index(), *args)
