"""The pictures of the site, made of what the package itself says: docs/pictures/*.svg.

    python -m tools.pictures            # all of them
    python -m tools.pictures mesh       # one

`mesh`: what each device of a mesh holds of a tensor, by placements. `operation`: which files an
operation goes through the first time, and afterwards. `layouts`: a block's operations, and what is
moved between them. `step`: the collectives of a training step, whose layouts are chosen in two
ways. `plan`: what a step needs on one device.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["SOURCE_DATE_EPOCH"] = "0"  # no date in the files
os.environ.setdefault("NPROC", "64")  # before JAX starts: simulated devices wait for each other

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, parallel

import xla_dtensor as xd
from tools.package_calls import package_calls
from xla_dtensor.planning.collectives import HloCollective, collectives

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
# Of a light and of a dark page: neither black nor white.
INK, PALE, HELD = "#7a7f87", "#7a7f8733", "#3f51b5"
AXES = {"dp": "#e65100", "tp": "#3f51b5"}
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "xla_dtensor",  # the same file in each run
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.edgecolor": INK,
    "savefig.transparent": True,
}


def _canvas(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)  # as on a page: downwards
    axes.axis("off")
    return figure, axes


def _mesh() -> Any:
    return xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


# --- what devices hold ---------------------------------------------------------------------------


def mesh() -> Figure:
    """A tensor in three layouts on a mesh: per device the part that it holds."""
    on = _mesh()
    cases = (
        ("Shard(0), Shard(1)", [Shard(0), Shard(1)]),
        ("Shard(0), Replicate()", [Shard(0), Replicate()]),
        ("Replicate(), Partial()", [Replicate(), Partial()]),
    )
    figure, axes = _canvas(9.6, 2.7)
    for k, (title, placements) in enumerate(cases):
        x = distribute_tensor(torch.ones(8, 8), on, placements)
        left = 0.45 + 3.15 * k
        axes.text(left + 1.2, 0.3, f"dp, tp: {title}", ha="center", size=9, weight="bold")
        for shard in x.local_shards:
            row, column = divmod(int(shard.device), 4)
            _held(axes, left + 0.62 * column, 0.75 + 0.85 * row, shard.index, x.shape, placements)
        for row in range(2):
            axes.text(left - 0.08, 1.0 + 0.85 * row, f"dp={row}", ha="right", size=7)
        for column in range(4):
            axes.text(left + 0.25 + 0.62 * column, 0.66, f"tp={column}", ha="center", size=7)
    axes.text(
        *(4.8, 2.58, "one tensor of 8 x 8 on eight devices: what each holds"),
        ha="center",
        size=8,
        style="italic",
    )
    return figure


def _held(axes: Any, x: float, y: float, index: Any, shape: Any, placements: Any) -> None:
    size = 0.5
    axes.add_patch(Rectangle((x, y), size, size, facecolor=PALE, edgecolor=INK, linewidth=0.6))
    (top, bottom), (left, right) = (s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    unit = size / shape[0]
    pending = any(p.is_partial() for p in placements)
    part = Rectangle(
        *((x + left * unit, y + top * unit), (right - left) * unit, (bottom - top) * unit),
        facecolor=HELD,
        alpha=0.4 if pending else 1,
    )
    axes.add_patch(part)
    if pending:  # each has a part of the sum
        axes.text(x + size / 2, y + size / 2 + 0.07, "+", ha="center", size=11, color=INK)


# --- an operation's way --------------------------------------------------------------------------


def operation() -> Figure:
    """The folders and files of the package that ``x @ w`` comes through."""
    on = _mesh()
    x = distribute_tensor(torch.ones(8, 8), on, [Shard(0), Replicate()])
    w = distribute_tensor(torch.ones(8, 8), on, [Replicate(), Shard(1)])
    with xd.config.override(eager="strict"):
        first = _files(lambda: torch.mm(x, w))
        torch.mm(x, w)
        again = _files(lambda: torch.mm(x, w))
    steps: list[tuple[str, list[str]]] = []
    for folder in ("dispatch", "plans", "rules", "lowering", "execution", "forms", "tensors"):
        files = [file for file in first if file.split("/")[0] == folder]
        steps.append((folder, files))
    figure, axes = _canvas(9.6, 0.9 + 0.62 * len(steps))
    axes.text(3.1, 0.3, "the first time", ha="center", size=9, weight="bold")
    axes.text(7.7, 0.3, "and from then on", ha="center", size=9, weight="bold")
    for row, (folder, files) in enumerate(steps):
        y = 0.55 + 0.62 * row
        kept = [file for file in files if file in again]
        _box(axes, 1.5, y, folder, SAYS[folder], files)
        if kept:
            _box(axes, 6.1, y, folder, "", kept)
        if row:
            _arrow(axes, 3.1, y - 0.12, y)
    return figure


SAYS = {
    "dispatch": "the one path of every operation",
    "plans": "how such calls are computed",
    "rules": "the result's layout",
    "lowering": "the JAX function",
    "execution": "who runs it: now, or later",
    "forms": "arrays, storages and views",
    "tensors": "what the user sees",
}


def _files(run: Callable[[], Any]) -> list[str]:
    """The files of the package whose functions ``run`` calls, in the order of their first calls."""
    return list(dict.fromkeys(name.partition(":")[0] for name in package_calls(run)))


def _box(axes: Any, x: float, y: float, title: str, says: str, files: Sequence[str]) -> None:
    axes.add_patch(Rectangle((x, y), 3.2, 0.5, facecolor=PALE, edgecolor=HELD, linewidth=0.9))
    axes.text(x + 0.08, y + 0.19, f"{title}/", size=8, weight="bold")
    axes.text(x + 3.12, y + 0.19, says, size=7, ha="right", style="italic")
    names = [file.partition("/")[2].removesuffix(".py") for file in files]
    names = [name for name in names if name != "__init__"]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    axes.text(x + 0.08, y + 0.4, shown, size=6.5)


def _arrow(axes: Any, x: float, top: float, bottom: float) -> None:
    axes.add_patch(
        FancyArrowPatch((x, top), (x, bottom), arrowstyle="-|>", mutation_scale=7, color=INK)
    )


# --- a block's layouts ---------------------------------------------------------------------------


def layouts() -> Figure:
    """The operations of an MLP block, their layouts, and what is moved between them."""
    on = _mesh()
    x = distribute_tensor(torch.randn(8, 16), on, [Shard(0), Replicate()])
    up = distribute_tensor(torch.randn(32, 16), on, [Replicate(), Shard(0)])
    down = distribute_tensor(torch.randn(16, 32), on, [Replicate(), Shard(1)])

    def block(x: torch.Tensor) -> Any:
        hidden = F.gelu(F.linear(x, up))
        out: Any = F.linear(hidden, down)
        return x + out.reduce_partial()

    operations = xd.explain(block, x).ops
    figure, axes = _canvas(9.6, 0.8 + 0.62 * len(operations))
    for k, (name, colour) in enumerate(AXES.items()):
        axes.add_patch(Rectangle((6.6 + 1.3 * k, 0.2), 0.2, 0.16, facecolor=colour))
        axes.text(6.9 + 1.3 * k, 0.34, f"cut along {name}", size=7.5)
    for row, each in enumerate(operations):
        y = 0.6 + 0.62 * row
        axes.text(0.3, y + 0.3, each.op.removeprefix("aten::"), size=9, weight="bold")
        axes.text(2.1, y + 0.3, each.layouts_text, size=8, family="monospace")
        _cut(axes, 6.7, y + 0.02, each.outputs[0])
        moves = [f"{move.kind}, {move.nbytes} B" for move in each.redistributions]
        axes.text(7.6, y + 0.3, "; ".join(moves), size=7.5, color="#c62828")
    return figure


def _cut(axes: Any, x: float, y: float, layout: Any) -> None:
    """A tensor, with the lines along which it is cut in the colours of mesh dims."""
    width, height = 0.7, 0.46
    axes.add_patch(Rectangle((x, y), width, height, facecolor=PALE, edgecolor=INK, linewidth=0.6))
    for (name, size), placement in zip((("dp", 2), ("tp", 4)), layout.placements, strict=True):
        if placement.is_partial():
            axes.text(x + width / 2, y + 0.31, "+", ha="center", size=11)
        for i in range(1, size) if placement.is_shard() else ():
            if placement.dim:
                xs, ys = (x + i / size * width,) * 2, (y, y + height)
            else:
                xs, ys = (x, x + width), (y + i / size * height,) * 2
            axes.plot(xs, ys, color=AXES[name], linewidth=1.6)


# --- a step's collectives ------------------------------------------------------------------------


def step() -> Figure:
    """The collectives of a training step of one transformer block, whose weights are cut over both
    mesh dims: chosen operation by operation, and over the step."""
    wide, heads = 128, 8
    shapes = dict.fromkeys("qkvo", (wide, wide))
    shapes |= {"up": (4 * wide, wide), "down": (wide, 4 * wide)}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(-2)

    def train_step(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        own = {n: w.detach().requires_grad_() for n, w in zip(shapes, weights, strict=True)}
        y = x + F.linear(attend(*(F.linear(x, own[n]) for n in "qkv")), own["o"])
        y = y + F.linear(F.gelu(F.linear(y, own["up"])), own["down"])
        return torch.autograd.grad(y.square().mean(), [*own.values()])

    on = _mesh()
    x = distribute_tensor(torch.randn(32, 64, wide), on, [Shard(0), Replicate()])
    placed = []
    for name, shape in shapes.items():
        rows, columns = Shard(0), Shard(1)
        where = [rows, columns] if name in ("o", "down") else [columns, rows]
        placed.append(distribute_tensor(torch.randn(shape) / wide, on, where))
    found = {}
    for layouts, title in (("torch", "operation by operation"), ("step", "over the whole step")):
        run = xd.compile(train_step, layouts=layouts)
        run(x, *placed)
        text = run.compiled_programs()[-1].as_text()
        found[title] = collectives(text, (2, 4), tuple(AXES))
    return _bars(found)


def _bars(found: dict[str, list[HloCollective]]) -> Figure:
    """A bar for each kind of collectives along some mesh dims, as long as their bytes."""
    nbytes, times = defaultdict[str, Counter[Any]](Counter), Counter[Any]()
    for title, own in found.items():
        for each in own:
            key = each.kind, " and ".join(each.dims)
            nbytes[title][key] += each.bytes * each.times
            times[title, key] += each.times
    figure, axes = _canvas(9.6, 0.3 + 0.3 * sum(len(sums) + 2 for sums in nbytes.values()))
    most, y = max(max(sums.values()) for sums in nbytes.values()), 0.4
    for title, sums in nbytes.items():
        axes.text(0.3, y, f"{title}: {sums.total() / 1e6:.2f} MB a device", size=10, weight="bold")
        for (kind, dims), size in sums.most_common():
            y += 0.3
            colour, width = AXES.get(dims, INK), 4.6 * size / most
            axes.text(0.5, y, f"{times[title, (kind, dims)]} {kind} along {dims}", size=8)
            axes.add_patch(Rectangle((3.4, y - 0.15), width, 0.2, facecolor=colour))
            axes.text(3.5 + width, y, f"{size / 1e6:.2f} MB", size=8)
        y += 0.6
    return figure


# --- a plan --------------------------------------------------------------------------------------


def plan(folder: Path = FOLDER) -> None:
    """What a training step of a small MLP needs on one device, and what it communicates."""
    on = _mesh()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)
        )
    styles = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(model.to("xla"), on["tp"], styles)
    xd.fully_shard(model, mesh=on["dp"])
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train_step.__qualname__ = "train_step"
    x = xd.from_device_values([torch.randn(256, 1024) for _ in range(2)], on["dp"])
    report = xd.plan(xd.compile(train_step), x)
    report.save(folder / "plan.svg")


DRAWN: dict[str, Callable[[], Figure]] = {f.__name__: f for f in (mesh, operation, layouts, step)}
PICTURES = (*DRAWN, "plan")


def make(name: str, folder: Path = FOLDER) -> Path:
    """Draw one of `PICTURES`; the file."""
    path = folder / f"{name}.svg"
    with matplotlib.rc_context(STYLE):
        if name == "plan":
            plan(folder)
        else:
            DRAWN[name]().savefig(path)
    return path


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for picture in sys.argv[1:] or PICTURES:
        print(make(picture))
