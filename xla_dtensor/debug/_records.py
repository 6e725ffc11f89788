"""What is recorded of one operation: arguments, results, rule, redistributions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base.source_line import short_path
from xla_dtensor.mesh.layout import Layout

ITSELF = ""
"""The argument of what is nothing but a redistribution."""

MANY = 6
"""Of more tensors layouts are counted rather than listed."""

AnyLayout: TypeAlias = Layout | str
"""Of a sharded tensor its layout; of another a word on where it is."""


@dataclass(frozen=True)
class Transfer:
    """One collective that `explain` has seen.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute", "copy" (to
            other devices), or "cut": a replicated value is cut where it is.
        along: the names of the mesh dims that it runs along.
        nbytes: the bytes that each device sends, and receives.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        x = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0)])
        (op,) = xd.explain(lambda: x.redistribute(placements=[xd.Replicate()]))
        (transfer,) = op.redistributions[0].transfers
        assert isinstance(transfer, xd.debug.Transfer)
        assert (transfer.kind, transfer.along, transfer.nbytes) == ("all-gather", "dp", 28)
    """

    kind: str
    along: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind} over {self.along}" if self.along else self.kind


@dataclass(frozen=True)
class Redistribution:
    """A tensor that is used in, or ends in, another layout than it has.

    Attributes:
        argument: which one: the name of an argument of the operation, "result", or "" of what is
            nothing but a redistribution.
        source, target: the layouts: a `Layout`, or a word (see `Operation`).
        transfers: what brings it from one to the other, in order.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        x = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0)])
        (op,) = xd.explain(lambda: x.redistribute(placements=[xd.Replicate()]))
        (moved,) = op.redistributions
        assert isinstance(moved, xd.debug.Redistribution) and moved.source == x.layout
        assert moved.kind == "all-gather over dp" and moved.nbytes == 7 * 4
    """

    argument: str
    source: AnyLayout
    target: AnyLayout
    transfers: tuple[Transfer, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that each device sends, and receives."""
        return sum(each.nbytes for each in self.transfers)

    @property
    def kind(self) -> str:
        """The collectives, in words: "all-gather over tp"."""
        return ", ".join(map(str, self.transfers))

    def __str__(self) -> str:
        layouts = f"{layout_text(self.source)} -> {layout_text(self.target)}"
        return f"{self.argument} {layouts}: {self.kind}, {bytes_text(self.nbytes)}".lstrip()


@dataclass(frozen=True)
class Operation:
    """One operation on xla tensors, as `explain` lists it and logs have it.

    Attributes:
        op: its name: an aten or custom overload, "redistribute", "to_local", "from_local",
            "all_reduce" and the like, or the name of a `DFunction`'s op.
        inputs, outputs: per tensor its layout; "per-device(dp)" of a per-device tensor that varies
            along dp, "per-device" of one that doesn't vary, "cpu" of one on the CPU.
        input_shapes, output_shapes: the same tensors' shapes.
        kind: whose rule it is: "user", "torch" (``register_sharding``) or "family" (the library's
            own); "compiler" if XLA chose the layouts of the results; "view" if nothing is computed;
            "-" where there is nothing to choose.
        rule: what the rule says, in a few words or as a notation.
        where: the line that registered the rule, or the module of a family.
        redistributions: the inputs (and a written argument) that change their layout for it.
        exchanges: whether shards need values of each other besides; the rule doesn't say how much.
        at: the line of the user's code that ran it, ``file:line``; in backward that of
            ``backward()``.
        traced: whether it is part of a compiled step.
        depth: how many `DFunction` calls it is inside of.
        mesh: the mesh of its sharded tensors, None without any.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        x = xd.distribute_tensor(torch.ones(8, 4), mesh, [xd.Shard(0)])
        w = torch.ones(4, 2, device="xla")
        (op,) = xd.explain(lambda: x @ w)
        assert isinstance(op, xd.debug.Operation) and op.op == "aten::mm.default"
        assert op.layouts_text == "[dp, None], per-device -> [dp, None]" and not op.is_move
        assert op.how == op.rule_text == 'family matmul "m k, k n -> m n"' and op.moved_bytes == 0
    """

    op: str
    inputs: tuple[AnyLayout, ...]
    outputs: tuple[AnyLayout, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    kind: str
    rule: str
    where: str
    redistributions: tuple[Redistribution, ...]
    exchanges: bool
    at: str
    traced: bool
    depth: int
    mesh: DeviceMesh | None

    @property
    def moved_bytes(self) -> int:
        """The bytes that each device sends, and receives, for the redistributions."""
        return sum(each.nbytes for each in self.redistributions)

    @property
    def layouts_text(self) -> str:
        """The layouts: ``[dp, None], [None, tp] -> [dp, tp]``."""
        inputs, outputs = _list_text(self.inputs), _list_text(self.outputs) or "()"
        return f"{inputs} -> {outputs}" if inputs else f"-> {outputs}"

    @property
    def rule_text(self) -> str:
        """The rule: ``family matmul "m k, k n -> m n"``."""
        if self.kind in ("-", "compiler", "view"):
            return f"{self.kind} ({self.rule})" if self.rule else self.kind
        if self.kind == "family":
            rule = self.rule.removeprefix(f"{self.where}: ")
            rule = f' "{rule}"' if "->" in rule else f": {rule}"
            return f"family {self.where}{rule}"
        rule = f'"{self.rule}"' if "->" in self.rule else self.rule
        return f"{self.kind} {rule} ({short_path(self.where)})"

    @property
    def is_move(self) -> bool:
        """Whether it is nothing but the redistribution of its input."""
        return [each.argument for each in self.redistributions] == [ITSELF]

    @property
    def how(self) -> str:
        """The rule; of what is nothing but a redistribution the collectives and their bytes."""
        if not self.is_move:
            return self.rule_text
        (each,) = self.redistributions
        return f"{each.kind}, {bytes_text(each.nbytes)}" if each.transfers else "nothing moves"

    def __str__(self) -> str:
        """In one line, as it is logged."""
        mesh = "" if self.mesh is None else f" {mesh_text(self.mesh)}"
        text = f"{self.op}{mesh} {self.layouts_text}  "
        text += self.how if self.is_move else f"rule: {self.how}"
        if self.redistributions and not self.is_move:
            text += f"  moves: {'; '.join(map(str, self.redistributions))}"
        if self.exchanges:
            text += "  and shards exchange values"
        return f"{text}  at {short_path(self.at)}"


def _list_text(layouts: tuple[AnyLayout, ...]) -> str:
    """Layouts one by one, of many how often each occurs."""
    texts = [layout_text(layout) for layout in layouts]
    if len(texts) > MANY:
        texts = [f"{n} x {text}" for text, n in Counter(texts).items()]
    return ", ".join(texts)


def layout_text(layout: AnyLayout) -> str:
    """A layout without its mesh: ``[dp, None; sum over tp]``."""
    if isinstance(layout, str):
        return layout
    if layout.ndim is None:
        return f"[{', '.join(map(str, layout.placements))}]"
    dims = (n if isinstance(n, str) else f"({', '.join(n)})" for n in layout.alias_tensor_map)
    names = layout.mesh.mesh_dim_names or range(layout.mesh.ndim)
    pending = (
        f"{op} over {name}"
        for name, op in zip(names, layout.partial, strict=True)
        if op is not None
    )
    return f"[{'; '.join(filter(None, (', '.join(dims), *pending)))}]"


def mesh_text(mesh: DeviceMesh) -> str:
    """The names and sizes of the mesh's dims: ``(dp=2, tp=4)``."""
    names = mesh.mesh_dim_names or range(mesh.ndim)
    return f"({', '.join(f'{n}={s}' for n, s in zip(names, mesh.shape, strict=True))})"


def bytes_text(nbytes: int) -> str:
    """A number of bytes: ``384 B``, ``1.5 KiB``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    power = min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
