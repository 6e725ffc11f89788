"""The tables of docs/horovod.md: every name of `xla_dtensor.horovod`, for which ranks it is and how
many tests name it; and the tests by class.

    python tools/horovod_names.py            # print them
    python tools/horovod_names.py --write    # put them into docs/horovod.md

It also writes `collectives.pyi`, the signatures of the functions that `horovod/api/variants.py`
makes, as type checkers and editors see them.

A case counts for a name if its code, or a function of its module that it calls, says ``hvd.name``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "horovod.md"
SIGNATURES = ROOT / "xla_dtensor" / "horovod" / "api" / "collectives.pyi"
sys.path.insert(0, str(ROOT))

import tests.horovod.cases  # noqa: E402, F401  (registers them)
import xla_dtensor.horovod as hvd  # noqa: E402
from tests.horovod import ranks  # noqa: E402
from tests.horovod.ranks import ALL, CASES, KINDS, Case  # noqa: E402
from xla_dtensor.horovod.api import collectives  # noqa: E402

OF_HOROVOD = {
    "V": 38, "D": 11, "P": 18, "R": 9, "E1": 5, "E2": 15, "O": 2, "J": 3, "T": 3, "B": 2, "G": 9,
}  # fmt: skip
"""Of the 115 tests in Horovod's test_torch.py, how many are of each class (findings/FIELD.md)."""

NOT_EVERYWHERE = {
    "run": "threads",
    "mesh": "devices, processes",
    "PerRank": "devices",
}


@cache
def functions_of(module: Any) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def names_in(case: Case) -> set[str]:
    """The names of Horovod that a case's code says."""
    module = inspect.getmodule(case.body)
    seen: set[tuple[Any, str]] = set()
    found: set[str] = set()
    waiting = [(module, case.body.__name__)]
    while waiting:
        where, name = waiting.pop()
        functions = functions_of(where)
        if (where, name) in seen or name not in functions:
            continue
        seen.add((where, name))
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Name) and node.value.id == "hvd":
                    found.add(node.attr)
            elif isinstance(node, ast.Name):
                target = getattr(where, node.id, None)
                home = inspect.getmodule(target) if inspect.isfunction(target) else None
                if home is ranks or (home and home.__name__.startswith("tests.horovod")):
                    waiting.append((home, node.id))
    return found


def names_table() -> str:
    """A row per name."""
    uses: dict[str, Counter[str]] = {name: Counter() for name in hvd.__all__}
    for case in CASES.values():
        for name in names_in(case) & uses.keys():
            uses[name].update(case.where)
    uses["run"]["threads"] = sum("threads" in case.where for case in CASES.values())
    rows = ["| name | ranks | devices | threads | processes |", "|---|---|---:|---:|---:|"]
    for name in sorted(hvd.__all__, key=str.lower):
        counts = " | ".join(str(uses[name][where]) for where in ALL)
        rows.append(f"| `{name}` | {NOT_EVERYWHERE.get(name, 'all')} | {counts} |")
    return "\n".join(rows)


def classes_table() -> str:
    """A row per class of tests."""
    rows = [
        "| class | in Horovod | devices | threads | processes |",
        "|---|---:|---:|---:|---:|",
    ]
    total: Counter[str] = Counter()
    for kind, what in KINDS.items():
        counts = Counter(where for c in CASES.values() if c.kind == kind for where in c.where)
        total.update(counts)
        numbers = " | ".join(str(counts[where]) for where in ALL)
        rows.append(f"| {kind}: {what} | {OF_HOROVOD.get(kind, '')} | {numbers} |")
    rows.append(f"| all | {sum(OF_HOROVOD.values())} | {' | '.join(str(total[w]) for w in ALL)} |")
    return "\n".join(rows)


def with_tables(text: str) -> str:
    """The page with both tables as they are now."""
    for name, table in (("classes", classes_table()), ("names", names_table())):
        begin = f"<!-- {name}: made by tools/horovod_names.py --write -->\n"
        head, rest = text.split(begin)
        text = f"{head}{begin}{table}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return text


def signatures() -> str:
    """The text of `collectives.pyi`."""
    rows = [
        "# Made by tools/horovod_names.py --write.",
        "# fmt: off",
        "# ruff: noqa: E501",
        "from collections.abc import Sequence",
        "from typing import Any",
        "",
        "from xla_dtensor.horovod.collectives.requests import Handle",
        "",
    ]
    for name, function in vars(collectives).items():
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            parameters = ", ".join(
                f"{each.name}: {each.annotation}{'' if each.default is each.empty else ' = ...'}"
                for each in signature.parameters.values()
            )
            result = inspect.formatannotation(signature.return_annotation)
            result = result.replace("typing.", "").rpartition("requests.")[2]
            rows.append(f"def {name}({parameters}) -> {result}: ...")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
        SIGNATURES.write_text(signatures())
    else:
        print(classes_table(), names_table(), sep="\n\n")


if __name__ == "__main__":
    main()
