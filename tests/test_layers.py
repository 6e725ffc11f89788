"""The package's floors: `tools/import_graph.py` says what they are, `docs/architecture.md` why."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tools import import_graph as graph

MODULES = graph.modules()
Trees = dict[str, ast.Module]
Imports = list[graph.Import]

# A file of one class may be longer: cut to fit, it would be harder to read, not easier.
MOST_LINES = 400


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Of all modules. Not at import, where each of pytest's workers would parse the package."""
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


@pytest.fixture(scope="module")
def imports(trees: Trees) -> Imports:
    return list(graph.imports(MODULES, trees))


def told(found: Imports) -> str:
    return "\n".join(map(str, found))


def test_imports_point_down(imports: Imports) -> None:
    assert not (wrong := graph.upward(imports)), told(wrong)


def test_imports_between_rooms_point_down(imports: Imports) -> None:
    assert not (wrong := graph.upward_in_rooms(imports, MODULES)), told(wrong)


# Modules side by side in one folder: more than that nobody overlooks.
MOST_FILES = 20


def test_no_folder_is_crowded() -> None:
    side_by_side = Counter(
        path.parent.relative_to(graph.ROOT / graph.PACKAGE).as_posix()
        for path in MODULES.values()
        if path.name != "__init__.py"
    )
    assert {name: n for name, n in side_by_side.items() if n > MOST_FILES} == {}


# Classes of one name in two places, and why. It only gets shorter.
SHARED_NAMES = {
    "Call": "the plans', the protocol that executors see of it, and the rules', which is public",
    "Plan": "the plans', and the protocol that executors see of it",
    "CheckpointManager": "also a name of torch_xla's",
    "StepTrace": "also a name of torch_xla's",
    "DistributedOp": "also a name of HyperParallel's",
    "Layout": "also a name of HyperParallel's",
}


def test_a_class_name_means_one_thing(trees: Trees) -> None:
    """But for Horovod's, in its own folder."""
    names = Counter(
        node.name
        for name, tree in trees.items()
        if graph.folder(name) != "horovod"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, n in names.items() if n > 1} == SHARED_NAMES.keys()


def test_no_file_imports_itself_by_way_of_others(imports: Imports) -> None:
    assert graph.circles(imports) == []


def test_imports_stand_at_the_top(imports: Imports) -> None:
    assert not (wrong := graph.late(imports)), told(wrong)


def test_private_names_stay_in_their_folder(imports: Imports) -> None:
    assert not (wrong := graph.private(imports)), told(wrong)


def test_nothing_imports_the_doors(imports: Imports) -> None:
    wrong = [i for i in imports if graph.folder(i.target) in graph.DOORS]
    assert not wrong, told(wrong)


# Who runs operations is an object that is told, and asked for what is needed (`base/executor.py`).
# Which kind it is, is asked in its own rooms, and here. A list that only gets shorter.
ASKED_ABOUT = {
    # which trace: what was made in one must not be used in another
    "horovod.world.in_trace": {"trace"},
    "parallel._parameter": {"trace"},
    "parallel._whole": {"trace"},
    # what is written down of calls and looked up again holds in one of the two
    "dispatch.execute": {"trace"},
    "forms.read": {"trace"},
    "plans.call": {"trace"},
    "tensors.indexing": {"enclosing"},
    # only a trace has this, or it has it in another way
    "compat.torch_xla.distributed.spmd.marking": {"trace"},
    "custom_ops.results": {"trace"},
    "debug._recorder": {"trace"},
    "dispatch.host_copies": {"enclosing"},
    "dispatch.several_devices": {"trace"},
    "horovod.ranks.devices": {"trace"},
    "integration.operators.backward": {"trace"},
    "integration.optimizers.grad_scaler": {"trace"},
    "horovod.ranks.several": {"trace"},
    "planning.abstract": {"trace"},
    # a storage is told before its executor is known
    "forms.storage": {"enclosing", "enclosing_batch"},
    "integration.optimizers.optimizer_steps": {"trace", "enclosing_batch", "is_in_step"},
}
QUESTIONS = {"trace", "batch", "is_step", "enclosing", "enclosing_batch", "is_in_step"}
OWN_ROOMS = ("base.executor", "execution", "compilation")


def questions_in(module: ast.Module) -> set[str]:
    """What a module asks of `base.executor`, or of the executor that it gives."""
    gives = "executor.current"
    named = {
        target.id
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(f"{gives}()")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    of = {"executor", f"{gives}()", *named}
    return {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and node.attr in QUESTIONS
        and ast.unparse(node.value) in of
    }


def test_few_ask_which_executor_it_is(trees: Trees) -> None:
    found = {}
    for name, path in MODULES.items():
        short, text = name.removeprefix("xla_dtensor."), path.read_text()
        if "executor" in text and not short.startswith(OWN_ROOMS):
            found[short] = questions_in(trees[name])
    assert {name: asked for name, asked in found.items() if asked} == ASKED_ABOUT


# Where devices come from is a question of the floors that have devices, and of who plans.
ASK_FOR_A_TOPOLOGY = {
    *("compilation.step.compiled_step", "compilation.step.replayed"),
    *("compilation.trace.optimizers", "ecosystem.torchtitan.trainer", "execution"),
    "forms.host_values",
    *("integration.optimizers.optimizer_steps", "lowering.attention.cudnn"),
}


def test_few_ask_whether_devices_are_abstract() -> None:
    found = {
        name.removeprefix("xla_dtensor.")
        for name, path in MODULES.items()
        if "abstract.current()" in path.read_text()
        and graph.folder(name) not in ("runtime", "mesh", "planning")
    }
    assert found == ASK_FOR_A_TOPOLOGY


# Other ways to ask what `is_ours` says.
BY_HAND = re.compile(
    r"isinstance\(.*, .*\b(TensorMethods|OurTensor|Ours)\b.*\)"
    r"|isinstance\(.*, .*(XLATensor\b.*XLAShardedTensor|XLAShardedTensor\b.*XLATensor).*\)"
    r"|hasattr\(.*, '_storage_'\)"
)


def asked_by_hand(tree: ast.AST) -> list[int]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if BY_HAND.fullmatch(ast.unparse(call))]


def test_one_predicate_says_what_is_ours(trees: Trees) -> None:
    """`base/ours.py`. Which view a tensor is, is another question: isinstance of one class."""
    found = {f"{name}:{line}" for name, tree in trees.items() for line in asked_by_hand(tree)}
    named = {
        name
        for name, path in MODULES.items()
        if re.search(r"def _?(is|are|may_be)_ours\b", path.read_text())
    }
    assert not found and not named


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(f(x), TensorMethods)",
        "isinstance(x, StandIn | Ours)",
        "isinstance(x, (XLATensor, XLAShardedTensor))",
        'hasattr(xs[0], "_storage_")',
    ],
)
def test_questions_by_hand_are_found(text: str) -> None:
    assert asked_by_hand(ast.parse(text)) == [1]
    assert asked_by_hand(ast.parse("isinstance(x, XLAShardedTensor)")) == []


def test_every_folder_has_a_floor() -> None:
    known = set(graph.floors()) | graph.DOORS
    assert {graph.folder(name) for name in MODULES} <= known


def test_files_can_be_read_in_one_sitting(trees: Trees) -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    long = {name: n for name, n in lines.items() if n > MOST_LINES}
    assert {name: n for name, n in long.items() if not is_one_class(trees[name])} == {}


def is_one_class(module: ast.Module) -> bool:
    """Whether all that a file has besides imports and constants is a class and short functions."""
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    return len(classes) == 1 and sum(f.end_lineno - f.lineno for f in functions) < MOST_LINES // 10


def test_modules_are_imported_by_statements(trees: Trees) -> None:
    """``importlib`` would get round the other tests. The package's `__init__` loads public names on
    first use, and the lowerings are found in their folder."""
    allowed = {"xla_dtensor", "xla_dtensor.lowering.families"}
    users = {
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "import_module"
    }
    own = {n for n in users if "xla_dtensor" in calls_of(trees[n])}
    assert own <= allowed


def calls_of(tree: ast.Module) -> str:
    """The arguments of all calls of ``import_module`` in a module."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return " ".join(
        ast.unparse(argument)
        for call in calls
        if ast.unparse(call.func).endswith("import_module")
        for argument in call.args
    )


# --- the tool itself -----------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with one of each mistake."""
    files = {
        "base/a.py": "def f():\n    from xla_dtensor.forms import b\n",
        "forms/b.py": "from xla_dtensor.base import a\nfrom xla_dtensor.dispatch._c import d\n",
        "dispatch/_c.py": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from xla_dtensor.forms.b import e\nd = 1\n",
        "mesh/d.py": "from ..lowering import x\nfrom . import e\n",
        "mesh/e.py": "import xla_dtensor.base.a\n",
        "lowering/x.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "xla_dtensor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for where in ("", "base", "forms", "dispatch", "mesh", "lowering"):
        (tmp_path / "xla_dtensor" / where / "__init__.py").write_text("")
    return tmp_path


def test_mistakes_are_found(package: Path) -> None:
    found = list(graph.imports(graph.modules(package)))

    def pairs(imports: list[graph.Import]) -> set[tuple[str, str]]:
        short = [(i.source.partition(".")[2], i.target.partition(".")[2]) for i in imports]
        return set(short)

    assert pairs(graph.upward(found)) == {
        ("base.a", "forms.b"),
        ("forms.b", "dispatch._c"),
        ("mesh.d", "lowering.x"),
    }
    assert pairs(graph.late(found)) == {("base.a", "forms.b")}
    assert pairs(graph.private(found)) == {("forms.b", "dispatch._c")}
    assert [{n.partition(".")[2] for n in group} for group in graph.circles(found)] == [
        {"base.a", "forms.b", "dispatch._c"}
    ]
    types = [i for i in found if i.for_types]
    assert pairs(types) == {("dispatch._c", "forms.b")}
    assert ("mesh.e", "base.a") in pairs(found) and ("mesh.d", "mesh.e") in pairs(found)


# --- docs/architecture.md ------------------------------------------------------------------------

TEXT = graph.DOCUMENT.read_text()


def test_the_picture_is_of_these_imports(imports: Imports) -> None:
    assert graph.with_picture(TEXT, graph.picture(imports, MODULES)) == TEXT, (
        "run python tools/import_graph.py --write"
    )


@pytest.mark.parametrize("place", sorted(set(re.findall(r"`(\w[\w/]*\.py:[\w.]+)`", TEXT))))
def test_the_walks_go_by_what_exists(place: str) -> None:
    file, _, name = place.partition(":")
    body: list[ast.stmt] = ast.parse((graph.ROOT / graph.PACKAGE / file).read_text()).body
    for part in name.split("."):
        found = [
            n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part
        ]
        assert found, f"{file} has no {name}"
        body = found[0].body


def test_every_folder_is_described() -> None:
    described = set(re.findall(r"^\| \d+ \| `(\w+)", TEXT, re.MULTILINE))
    assert {graph.folder(name) for name in MODULES} - graph.DOORS - {""} == described
