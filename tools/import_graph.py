"""The package's imports as a graph: what `tests/test_layers.py` checks, and the picture in
`docs/architecture.md`.

    python tools/import_graph.py                 # folders, what each imports, and what is wrong
    python tools/import_graph.py --picture       # the picture, as text
    python tools/import_graph.py --write         # put it into docs/architecture.md

An import counts wherever it stands: at the top of a file, in a function, or for types alone. Only
the source is read; nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "xla_dtensor"

# From the ground up. An import points to a folder further left, or stays in its own. Folders in one
# tuple don't know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "version"),
    ("base",),
    ("runtime",),
    ("mesh", "lowering"),
    ("rules", "forms"),
    ("tensors",),
    ("execution",),
    ("plans",),
    ("dispatch", "layouts"),
    ("movement", "blocks"),
    ("compilation", "custom_ops", "parallel", "checkpoint", "data", "weights"),
    ("horovod", "compat", "pipeline", "planning", "jax_programs", "elastic", "ragged"),
    ("debug", "tuning", "metrics", "control_flow"),
    ("integration",),
    ("ecosystem",),
    ("torchtitan",),
)

# Likewise the rooms of large folders, by the second part of a module's name; "" is what lies in the
# folder itself.
ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "base": (("tables",), ("torch_private",), ("",), ("random", "numbers")),
    "checkpoint": (("files",), ("",)),
    "lowering": (("",), ("partitioned",), ("views",), ("ops", "linalg"), ("attention", "nn")),
    "compilation": (
        ("code",),
        ("objects", "trace"),
        ("budget", "scan", "call"),
        ("watch",),
        ("recorded",),
        ("program",),
        ("step",),
        ("",),
    ),
    "integration": (
        ("patching",),
        ("debugging", "distributed", "modules", "optimizers"),
        ("operators",),
        ("device",),
        ("",),
    ),
}

# Where an import inside a function is right: they keep `import xla_dtensor` from loading JAX.
LATE = frozenset({"", "integration", "ecosystem", "torchtitan"})

# Names that 0.1.0 had. They only pass on what has moved, so they may import anything, and nothing
# in the package imports them.
DOORS = frozenset({"sharded_tensor", "factories", "dfunction", "_pickling", "plan", "tune"})


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        source, target: full names of modules of the package.
        names: what is taken out of ``target``; empty for the module itself.
        line: where in the source.
        late: whether it stands inside of a function.
        for_types: whether it stands under ``if TYPE_CHECKING``.
    """

    source: str
    target: str
    names: tuple[str, ...]
    line: int
    late: bool
    for_types: bool

    def __str__(self) -> str:
        what = f" ({', '.join(self.names)})" if self.names else ""
        how = " in a function" if self.late else " for types" if self.for_types else ""
        return f"{self.source}:{self.line} imports {self.target}{what}{how}"


def modules(root: Path = ROOT) -> dict[str, Path]:
    """All modules of the package, by their full names."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def folder(module: str) -> str:
    """The room that a module is in: the first part of its name in the package, "" at the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def room(module: str, known: Iterable[str]) -> str:
    """The room of a folder that a module is in, "" if it lies in the folder itself."""
    parts = module.split(".")
    inside = len(parts) > 3 or (len(parts) == 3 and any(n.startswith(f"{module}.") for n in known))
    return parts[2] if inside else ""


def imports(
    known: dict[str, Path], trees: Mapping[str, ast.Module] | None = None
) -> Iterator[Import]:
    """All imports of the package's modules by one another; ``trees`` if they are parsed already."""
    for source, path in known.items():
        tree = trees[source] if trees else ast.parse(path.read_text(), str(path))
        yield from _Visitor(source, path, known).of(tree)


class _Visitor:
    def __init__(self, source: str, path: Path, known: dict[str, Path]) -> None:
        self.source, self.known = source, known
        self.inside = source if path.name == "__init__.py" else source.rpartition(".")[0]

    def of(self, node: ast.AST, late: bool = False, types: bool = False) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for target, names in self._targets(child):
                    yield Import(self.source, target, names, child.lineno, late, types)
            elif isinstance(child, ast.expr):
                continue  # nearly all of a file, and no statement is in it
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    yield from self.of(ast.Module([statement], []), late, True)
                for statement in child.orelse:
                    yield from self.of(ast.Module([statement], []), late, types)
            else:
                inner = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from self.of(child, inner, types)

    def _targets(self, node: ast.Import | ast.ImportFrom) -> list[tuple[str, tuple[str, ...]]]:
        if isinstance(node, ast.Import):
            return [(a.name, ()) for a in node.names if a.name in self.known]
        base = node.module or ""
        if node.level:
            parts = self.inside.split(".")
            parts = parts[: len(parts) - node.level + 1]
            base = ".".join([*parts, base] if base else parts)
        found: dict[str, list[str]] = {}
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            if inner in self.known:
                found.setdefault(inner, [])
            elif base in self.known:
                found.setdefault(base, []).append(alias.name)
        return [(target, tuple(names)) for target, names in found.items()]


def floors(layers: Iterable[Iterable[str]] = LAYERS, roof: bool = True) -> dict[str, int]:
    """The floor of each folder; the package's own `__init__` is the ``roof``."""
    numbered = {name: number for number, names in enumerate(layers) for name in names}
    if roof:
        numbered[""] = len(numbered)
    return numbered


def upward(found: Iterable[Import]) -> list[Import]:
    """Imports that don't point strictly down and don't stay in their folder."""
    floor = floors()
    return [
        i
        for i in found
        if folder(i.source) not in DOORS
        and folder(i.source) != folder(i.target)
        and floor.get(folder(i.target), len(floor)) >= floor.get(folder(i.source), -1)
    ]


def upward_in_rooms(found: Iterable[Import], known: Iterable[str]) -> list[Import]:
    """Imports within a large folder that don't point strictly down and don't stay in their room."""
    names = list(known)
    wrong = []
    for i in found:
        rooms = ROOMS.get(folder(i.source))
        if rooms is None or folder(i.target) != folder(i.source):
            continue
        floor = floors(rooms, roof=False)
        source, target = room(i.source, names), room(i.target, names)
        if source != target and floor[target] >= floor[source]:
            wrong.append(i)
    return wrong


def private(found: Iterable[Import]) -> list[Import]:
    """Imports of another folder's private modules or names."""
    return [
        i
        for i in found
        if folder(i.source) != folder(i.target)
        and any(part.startswith("_") for part in (*i.target.split(".")[1:], *i.names))
    ]


def late(found: Iterable[Import]) -> list[Import]:
    """Imports inside of functions, where they hide a circle."""
    return [i for i in found if i.late and folder(i.source) not in LATE]


def circles(found: Iterable[Import]) -> list[list[str]]:
    """The groups of files that import each other, directly or not (Tarjan 1972)."""
    edges: dict[str, set[str]] = defaultdict(set)
    for i in found:
        if i.source != i.target:
            edges[i.source].add(i.target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                result.append(sorted(group))

    for node in list(edges):
        if node not in index:
            visit(node)
    return sorted(result, key=len, reverse=True)


# --- the picture ---------------------------------------------------------------------------------


def between_folders(found: Iterable[Import]) -> dict[str, set[str]]:
    """Per folder those that it imports from."""
    edges: dict[str, set[str]] = defaultdict(set)
    for i in found:
        source, target = folder(i.source), folder(i.target)
        if source != target and not {source, target} & DOORS:
            edges[source].add(target)
    return edges


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the edges that a path of others implies."""

    def reach(node: str) -> set[str]:
        below: set[str] = set()
        for target in edges.get(node, ()):
            below |= {target} | reach(target)
        return below

    return {
        node: {t for t in targets if not any(t in reach(other) for other in targets - {t})}
        for node, targets in edges.items()
    }


def picture(found: Iterable[Import], known: Iterable[str]) -> str:
    """A diagram of the folders in Mermaid's notation: an arrow says "imports"."""
    edges = reduced(between_folders(found))
    present = {folder(name) for name in known}
    lines = ["```mermaid", "flowchart TD"]
    for number, names in reversed(list(enumerate(LAYERS))):
        here = [name for name in names if name in present]
        if here:
            lines.append(f"  subgraph floor{number}[ ]")
            lines += [f"    {name}" for name in here]
            lines.append("  end")
    floor = floors()
    for source in sorted(edges, key=lambda name: (-floor[name], name)):
        start = source or "xla_dtensor"
        lines += [f"  {start} --> {target}" for target in sorted(edges[source])]
    return "\n".join([*lines, "```"])


BEGIN, END = "<!-- made by tools/import_graph.py --write -->", "<!-- end -->"
DOCUMENT = ROOT / "docs" / "architecture.md"


def with_picture(text: str, drawn: str) -> str:
    """``text`` with the picture between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{drawn}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Print what is wrong, or the picture; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--picture", action="store_true", help="print the picture")
    parser.add_argument("--write", action="store_true", help="put it into docs/architecture.md")
    chosen = parser.parse_args(arguments)
    known = modules()
    found = list(imports(known))
    drawn = picture(found, known)
    if chosen.picture:
        print(drawn)
    if chosen.write:
        DOCUMENT.write_text(with_picture(DOCUMENT.read_text(), drawn))
    if chosen.picture or chosen.write:
        return 0
    edges = between_folders(found)
    floor = floors()
    for name in sorted(edges, key=lambda name: (floor[name], name)):
        print(f"{name or 'xla_dtensor'}: {', '.join(sorted(edges[name], key=floor.__getitem__))}")
    wrong = {
        "upward": [*upward(found), *upward_in_rooms(found, known)],
        "late": late(found),
        "private": private(found),
        "in a circle": circles(found),
    }
    for what, cases in wrong.items():
        for case in cases:
            print(f"{what}: {case}")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
