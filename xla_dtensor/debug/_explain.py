"""`explain`: what layouts the operations of a function have, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from xla_dtensor.base.source_line import short_path
from xla_dtensor.debug._recorder import COMPILED_BEFORE, recorder
from xla_dtensor.debug._records import Operation, bytes_text, mesh_text

WIDEST = 72
"""A longer cell doesn't widen its column."""

_TRACED = """\
Traced for xd.compile: layouts and redistributions are those of the rules, as the step's Python sees
them. The program keeps to what the step asks for (redistribute, state); where all else lies is
chosen over the whole step, and step.layouts() says what that communicates."""
_COMPILED = """\
A compiled step ran a program that it had compiled before, and nothing was traced. Explain the first
call of a new one, xd.explain(xd.compile(function), ...), or the function itself."""
_NOTHING = "No operation on xla tensors."


class Explanation:
    """What `explain` saw; printed as a listing. It is a sequence of its operations.

    Attributes:
        ops: an `xla_dtensor.debug.Operation` for each, in order.
        result: what the function returned.
        moved_bytes: the bytes that each device sends, and receives, for all redistributions.

    Example::

        import io, torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        x = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0)])
        seen = xd.explain(lambda: x * 2, file=io.StringIO())
        assert isinstance(seen, xd.debug.Explanation) and len(seen) == 1 and seen.moved_bytes == 0
        assert seen.result.placements == (xd.Shard(0),)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.ops: list[Operation] = []
        self.result: Any = None

    @property
    def moved_bytes(self) -> int:
        """The sum of the operations' ``moved_bytes``."""
        return sum(op.moved_bytes for op in self.ops)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    def __repr__(self) -> str:
        return f"<Explanation of {self._name}: {len(self.ops)} operations>"

    def __str__(self) -> str:
        ops = [op for op in self.ops if op.rule != COMPILED_BEFORE]
        lines = [] if not ops else _listing(self._name, ops, self.moved_bytes)
        if any(op.traced for op in ops):
            lines.append(_TRACED)
        if len(ops) < len(self.ops):
            lines.append(_COMPILED)
        return "\n".join(lines or [_NOTHING])


def explain(
    fn: Callable[..., Any], *args: Any, file: TextIO | None = None, **kwargs: Any
) -> Explanation:
    """Run ``fn(*args, **kwargs)``, and print for each operation on xla tensors the layouts of its
    inputs and outputs, the rule that said so, and what is redistributed.

    Listed are operations of aten and custom ones, backward passes included; `redistribute`,
    ``full_tensor``, ``to_local`` and ``from_local``; collectives on per-device tensors; and
    `DFunction` calls, with the operations inside them indented. A layout is written by tensor dim,
    with the mesh dims that shard it: ``[dp, None; sum over tp]``; a per-device tensor that varies
    along dp is ``per-device(dp)``. What torch composes an operation of is part of it. Where the
    compiler chooses the layouts of results, nobody says which input it redistributes.

    Bytes are those that each device sends, and receives, in a ring: of an all-gather over n devices
    n - 1 times what a device has, of a reduce-scatter or an all-to-all (n - 1) / n of it, of an
    all-reduce twice that; cutting a replicated tensor moves nothing. They follow from the layouts:
    padding of uneven shards isn't counted, and a ``Partial`` result is counted where it is reduced
    by its layout, though XLA may have reduced it in the operation that made it. A view that needs
    data of other devices is counted once, where it is made.

    A step of `xla_dtensor.compile` is explained while it is traced, in its first call. Operations
    that other threads run meanwhile are listed too.

    Args:
        fn: is called once, with all its effects (gradients, optimizer steps).
        args, kwargs: its arguments.
        file: where to print; standard output by default, as of ``print``.

    Returns:
        an `Explanation`: the listing (``str()`` gives what was printed), its operations, and what
        ``fn`` returned.

    Raises:
        whatever ``fn`` raises; what was seen until then is printed.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        x = xd.distribute_tensor(torch.ones(8, 16), mesh, [xd.Shard(0), xd.Shard(1)])
        seen = xd.explain(lambda: x.sum(1).reduce_partial())  # prints two operations
        assert [op.op for op in seen.ops] == ["aten::sum.dim_IntList", "redistribute"]
        assert "all-reduce over tp" in str(seen)
    """
    explanation = Explanation(_name_of(fn))
    sink = explanation.ops.append
    recorder.add(sink)
    try:
        explanation.result = fn(*args, **kwargs)
    finally:
        recorder.remove(sink)
        print(explanation, file=sys.stdout if file is None else file)
    return explanation


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def _listing(name: str, ops: list[Operation], moved: int) -> list[str]:
    meshes = list(dict.fromkeys(op.mesh for op in ops if op.mesh is not None))
    on = f" on {mesh_text(meshes[0])}" if len(meshes) == 1 else ""
    count = f"{len(ops)} operation{'s' if len(ops) > 1 else ''}"
    lines = [f"{name}: {count}{on}, {bytes_text(moved)} moved per device"]
    rows = []
    at = None
    for number, op in enumerate(ops, 1):
        mesh = f"{mesh_text(op.mesh)} " if len(meshes) > 1 and op.mesh is not None else ""
        here = short_path(op.at)
        rows.append(
            (
                f"{number:>3}  {'  ' * op.depth}{op.op.removesuffix('.default')}",
                mesh + op.layouts_text,
                op.how,
                here if here != at else "",
            )
        )
        at = here
    widths = [
        max((len(row[column]) for row in rows if len(row[column]) <= WIDEST), default=0)
        for column in range(3)
    ]
    for op, row in zip(ops, rows, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]).rstrip())
        indent = " " * (7 + 2 * op.depth)
        if not op.is_move:
            lines += [f"{indent}moves {each}" for each in op.redistributions]
        if op.exchanges:
            lines.append(f"{indent}moves values between shards")
    return lines
