"""The folders of `xla_dtensor/horovod` import each other in one direction, as its README says."""

from __future__ import annotations

import re
from pathlib import Path

from tools import import_graph as graph

FOLDER = graph.ROOT / graph.PACKAGE / "horovod"
MOST_FILES = 20
BELOW = {
    "collectives": set(),
    "world": {"collectives"},
    "ranks": {"collectives", "world"},
    "api": {"collectives", "world"},
    "launching": {"world", "ranks"},
    "elastic": {"world", "api", "launching"},
}
"""By room, those that it may import from. The package's `__init__` stands above all of them."""


def room(module: str) -> str:
    return module.split(".")[2]


def test_rooms_import_the_ones_below() -> None:
    roof = f"{graph.PACKAGE}.horovod"
    own = {name: path for name, path in graph.modules().items() if name.startswith(f"{roof}.")}
    wrong = [
        str(found)
        for found in graph.imports(own)
        if room(found.target) not in BELOW[room(found.source)] | {room(found.source)}
    ]
    assert not wrong, "\n".join(wrong)


def test_each_room_fits_a_screen_and_says_what_is_in_it() -> None:
    for name in BELOW:
        files = [path for path in (FOLDER / name).iterdir() if path.is_file()]
        assert len(files) <= MOST_FILES, name
        text = (FOLDER / name / "README.md").read_text()
        own = {path.name for path in files if path.suffix == ".py"} - {"__init__.py"}
        assert not name or own == set(re.findall(r"`(\w+\.py)`", text)), name
        tests = re.findall(r"`((?:cases/|programs/|test_)\w*)`", text)
        assert all(exists(test) for test in tests), tests


def exists(test: str) -> bool:
    path = Path(__file__).parent / test
    return path.is_dir() or path.with_suffix(".py").exists()
