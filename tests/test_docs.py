"""The Python of the documentation pages runs as it is written, top to bottom.

The pages assert what they claim; `tests/test_readme.py` and `tests/parallel/test_recipes.py` have
the others.
"""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from xla_dtensor.base.tables.registry import Changes, Registry
from xla_dtensor.custom_ops import distributed_op

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(autouse=True)
def _own_ops(scratch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_op, "OPS", Registry("op", Changes()))  # names of other tests


def blocks(page: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "count", "printed"),
    [
        (
            "bring_your_own_op.md",
            10,
            [
                "Layout(dp=2, tp=4; [dp, tp, None])",
                "True True",
                "'... h!, h! -> ... h!' of 'RMSNorm' doesn't fit the arguments",
            ],
        ),
        (
            "seeing_layouts.md",
            2,
            [
                "step: 16 operations on (dp=2, tp=4), 896 B moved per device",
                "[dp, None; sum over tp] -> [dp, None]            all-reduce over tp, 384 B",
            ],
        ),
        ("how_it_works.md", 6, ["layer_norm"]),
        ("coming_from.md", 7, []),
        ("torch_xla.md", 1, []),
        ("paddle.md", 3, []),
        ("horovod.md", 2, ["the loss of 8 ranks is "]),
        ("context_parallel.md", 2, []),
        ("pipeline.md", 3, ["forward of microbatch 0 in stage 0"]),
        ("pods.md", 3, ["step on cpu:8"]),
        ("checkpoints.md", 3, []),
        ("libraries.md", 1, []),
        ("config.md", 1, ["switch             value"]),
        ("several_processes.md", 1, ["1 processes, the sum is 128.0"]),
        ("jax.md", 5, []),
        ("dfunction.md", 6, ["Layout(dp=2, tp=4; [None, None]; sum over tp)"]),
        (
            "compile.md",
            16,
            [
                *("1: 0.0", "2: 6.0", "3: 12.0"),
                "the compiled step from_file is stale: the operations would be others now.",
                "  traced:  mul(Literal(2.0)) -> float32[8,16]",
                "  now:     mul(Literal(3.0)) -> float32[8,16]",
            ],
        ),
    ],
)
def test_blocks_run(
    page: str, count: int, printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {"__name__": page}
    found = blocks(page)
    assert len(found) == count
    for block in found:
        exec(compile(block, page, "exec"), names)
    output = capsys.readouterr().out
    for line in printed:
        assert line in output


ROOT = Path(__file__).parents[1]
OWN = [  # not environments, caches, and what is built
    path
    for folder in ROOT.iterdir()
    if folder.name not in ("build", "dist")
    and not folder.name.startswith((".venv", ".cache", ".git"))
    for path in (folder.rglob("*") if folder.is_dir() else [folder])
]
PAGES = [path for path in OWN if path.suffix == ".md"]
FILES = {str(path.relative_to(ROOT)) for path in OWN if path.is_file()}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_pages_name_exist(page: Path) -> None:
    """``plans/plan.py`` in a page is a file whose path ends so."""
    named = set(re.findall(r"`([\w/.]+\.(?:py|md|txt))(?::[\w.]+)?`", page.read_text()))
    if page.name == "CHANGELOG.md":
        named = set()  # it says what was
    missing = {name for name in named if not any(f"/{f}".endswith(f"/{name}") for f in FILES)}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text())
    local = [link for link in links if "://" not in link]
    assert not [link for link in local if not (page.parent / link).exists()]


PACKAGE = ROOT / "xla_dtensor"
# Their files have the names of torch_xla's modules, each for what torch_xla has there.
NAMED_BY_OTHERS = PACKAGE / "compat" / "torch_xla"
FOLDERS = [
    path
    for path in sorted({file.parent for file in PACKAGE.rglob("*.py")})
    if path != PACKAGE and not path.is_relative_to(NAMED_BY_OTHERS)
]
READMES = sorted(PACKAGE.rglob("README.md"))


def readme(folder: Path) -> Path:
    """That of the folder, or of the nearest folder around it that has one."""
    return next(p / "README.md" for p in (folder, *folder.parents) if (p / "README.md").exists())


def in_code(text: str) -> str:
    """What a page has between backticks, and in indented blocks."""
    return "\n".join(re.findall(r"`[^`\n]+`|^ {4}.*$", text, re.MULTILINE))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_readme_names_each_file_of_its_folder(folder: Path) -> None:
    page = readme(folder)
    assert page.is_relative_to(PACKAGE), f"{folder} has no README.md"
    text = in_code(page.read_text())
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert not {name for name in files if not re.search(rf"(?<![\w.]){name}(?!\w)", text)}


@pytest.mark.parametrize("page", READMES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_tests_that_a_readme_names_exist(page: Path) -> None:
    """``test_plans``, ``tests/forms/test_forms`` and ``tests/oracle`` are there."""
    text = page.read_text()
    assert re.search("tested by", text, re.IGNORECASE)
    named = re.findall(r"`(tests/[\w/]+|test_\w+)(?:\.py)?`", text)
    there = {p for file in FILES for p in (file, *map(str, Path(file).parents))}
    missing = {
        name
        for name in named
        if not any(f"/{p.removesuffix('.py')}".endswith(f"/{name.rstrip('/')}") for p in there)
    }
    assert not missing


def test_the_map_of_the_tests_of_compiled_steps_has_them_all() -> None:
    text = in_code((PACKAGE / "compilation" / "README.md").read_text())
    tests = {path.stem for path in (ROOT / "tests" / "compilation").glob("test_*.py")}
    assert not {name for name in tests if not re.search(rf"\b{name}\b", text)}


def test_each_decision_has_its_day() -> None:
    text = (DOCS / "design.md").read_text()
    decisions = re.findall(r"^- \*\*.*?(?=^- |\n\n|\Z)", text, re.M | re.S)
    assert len(decisions) > 100
    assert not [text for text in decisions if not re.search(r"\b20\d\d-\d\d-\d\d\b", text)]


def test_how_it_works_is_short() -> None:
    assert len((DOCS / "how_it_works.md").read_text().splitlines()) <= 150


OURS = sorted(
    {
        (name, page)
        for page in PAGES
        if page.name not in ("CHANGELOG.md", "api.md")  # they have old names
        for name in re.findall(r"\b(?:xd|xla_dtensor)(?:\.[A-Za-z_]\w*)+", page.read_text())
        if not name.endswith((".md", ".py"))
    }
)


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_names_of_ours_in_pages_exist() -> None:
    """``xd.parallel.zero`` and ``xla_dtensor.ecosystem.ray`` are there, and no old names."""
    missing = {}
    for name, page in OURS:
        try:
            pkgutil.resolve_name(re.sub(r"^xd\b", "xla_dtensor", name))
        except (AttributeError, ImportError, DeprecationWarning) as error:
            missing[name] = (page.name, error)
    assert not missing
