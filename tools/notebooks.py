"""The notebooks of docs/tutorials: run, and written with what they print.

    python tools/notebooks.py docs/tutorials/*.ipynb            # fails if one prints something else
    python tools/notebooks.py --write docs/tutorials/*.ipynb

A cell prints what it prints, and the value of its last line, as in Jupyter. Numbers that a machine
decides (seconds, addresses) mustn't be in it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def run(notebook: dict[str, Any]) -> list[str]:
    """What each code cell prints, in a namespace of the notebook's own."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [
        _output_of("".join(cell["source"]), names)
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def _output_of(source: str, names: dict[str, Any]) -> str:
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
            if value is not None:
                print(repr(value))
    return printed.getvalue()


def stored(notebook: dict[str, Any]) -> list[str]:
    """What the notebook says that its code cells print."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join("".join(o.get("text", "")) for o in cell["outputs"]) for cell in cells]


def write(path: Path, notebook: dict[str, Any], outputs: list[str]) -> None:
    """Put what the code cells print into the file."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(cells, outputs, strict=True), 1):
        stream = {"output_type": "stream", "name": "stdout", "text": text.splitlines(True)}
        cell["outputs"] = [stream] if text else []
        cell["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def markdown(notebook: dict[str, Any]) -> str:
    """The notebook as a page."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        text = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        if text:
            parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run notebooks; the exit status says whether one prints something else than it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    differ = False
    for path in options.notebooks:
        notebook = json.loads(path.read_text())
        outputs = run(notebook)
        if options.write:
            write(path, notebook, outputs)
            continue
        for number, (now, said) in enumerate(zip(outputs, stored(notebook), strict=True), 1):
            if now != said:
                differ = True
                print(f"{path}, code cell {number}:\n--- it says\n{said}--- it prints\n{now}")
    sys.exit(differ)


if __name__ == "__main__":
    main()
