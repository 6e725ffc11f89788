"""What the package uses of torch and JAX that they don't promise is in `base/torch_private/` and
`base/jax_private.py` alone, and this version has all of it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tools import import_graph as graph
from xla_dtensor.base import jax_private, torch_private
from xla_dtensor.base.tables.borrowed import Borrowed

HERE = {
    "torch": "xla_dtensor.base.torch_private",
    "jax": "xla_dtensor.base.jax_private",
    "jaxlib": "xla_dtensor.base.jax_private",
}
OURS = {"torch_private": torch_private, "jax_private": jax_private}


def name_called(call: ast.Call) -> str:
    """The last name of what is called: ``c`` in ``a.b.c()``."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def is_private(path: str) -> bool:
    """Whether a dotted path has a name that begins with an underscore. Operators don't count:
    ``torch.ops.aten._to_copy``, and those that programs call as functions (`torch._foreach_add_`,
    `torch._scaled_mm`, `torch._grouped_mm`, `torch._assert_async`)."""
    if path.startswith("torch.ops."):
        return False
    parts = path.split(".")
    if parts[0] == "torch" and len(parts) == 2 and hasattr(torch.ops.aten, parts[1]):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


class Paths:
    """The dotted paths of torch, jax and jaxlib that a module names: where it imports, by the names
    that it has imported, and by variables that are one of those."""

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._known: dict[str, str] = {}

    def private(self) -> list[tuple[int, str]]:
        """Those that are private, with their lines."""
        found = [*self._imported()]
        while self._follow_assignments():
            pass
        # Of a.b.c the whole alone.
        inside = {id(node.value) for node in self._nodes if isinstance(node, ast.Attribute)}
        for node in self._nodes:
            if isinstance(node, ast.Attribute) and id(node) not in inside:
                found.append((node.lineno, self._path(node)))
            elif isinstance(node, ast.Call):
                found.append((node.lineno, self._asked(node)))
        return sorted({(line, path) for line, path in found if path and is_private(path)})

    def _imported(self) -> Iterator[tuple[int, str]]:
        for node in self._nodes:
            if isinstance(node, ast.Import):
                for name in node.names:
                    if name.name.partition(".")[0] in HERE:
                        short = name.name.partition(".")[0]
                        self._known[name.asname or short] = name.name if name.asname else short
                        yield node.lineno, name.name
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in HERE:
                for name in node.names:
                    path = f"{node.module}.{name.name}"
                    self._known[name.asname or name.name] = path
                    yield node.lineno, path

    def _follow_assignments(self) -> bool:
        new = {}
        for node in self._nodes:
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
            elif isinstance(node, ast.AnnAssign) and node.value:
                target, value = node.target, node.value
            else:
                continue
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            else:
                pairs = [(target, value)]
            for name, of in pairs:
                if isinstance(name, ast.Name) and name.id not in self._known and self._path(of):
                    new[name.id] = self._path(of)
        self._known.update(new)
        return bool(new)

    def _path(self, node: ast.AST) -> str:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self._known:
            return ".".join([self._known[node.id], *parts])
        return ""

    def _asked(self, call: ast.Call) -> str:
        """The name in ``getattr(torch, "_name")``, or in ``on_import("torch._name", ...)``."""
        name = name_called(call)
        texts = [a.value if isinstance(a, ast.Constant) else None for a in call.args[:2]]
        if name in ("getattr", "hasattr", "setattr", "delattr") and len(texts) == 2:
            path = self._path(call.args[0])
            return f"{path}.{texts[1]}" if path and isinstance(texts[1], str) else ""
        if name in ("on_import", "import_module", "find_spec") and isinstance(texts[0], str):
            return texts[0] if texts[0].partition(".")[0] in HERE else ""
        return ""


def test_private_names_are_in_two_modules(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{module}:{line} names {path}, which is private: it belongs in "
        f"{HERE[path.partition('.')[0]].replace('.', '/')}.py"
        for module, tree in trees.items()
        for line, path in Paths(tree).private()
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("import torch\ntorch._C._foo()", "torch._C._foo"),
        ("from torch._subclasses import FakeTensor", "torch._subclasses.FakeTensor"),
        ("import torch._dynamo", "torch._dynamo"),
        (
            "from torch import nn\nnn.modules.module._hooks.clear()",
            "torch.nn.modules.module._hooks",
        ),
        ("import torch\nc = torch.nn\nc._x = 1", "torch.nn._x"),
        ("import torch\na, b = torch.nn, torch.optim\nb.sgd._x", "torch.optim.sgd._x"),
        ("def f():\n    from jax._src import core", "jax._src.core"),
        ("import jaxlib._jax as x\nx.y", "jaxlib._jax"),
        ("from torch import optim\ngetattr(optim, '_x', None)", "torch.optim._x"),
        ("on_import('torch.testing._comparison', f)", "torch.testing._comparison"),
    ],
)
def test_private_names_are_found(text: str, path: str) -> None:
    assert any(found.startswith(path) for _, found in Paths(ast.parse(text)).private())


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.ops.aten._to_copy(x)",
        "import torch\ntorch._foreach_add_(x, 1)",
        "import torch\ntorch.__version__",
        "from torch import nn\nself._modules",
        "from xla_dtensor.x import _y",
    ],
)
def test_others_are_not(text: str) -> None:
    assert Paths(ast.parse(text)).private() == []


# --- the two modules -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", torch_private.NAMES)
def test_this_torch_has_it(name: str) -> None:
    since = torch_private.SINCE.get(name, (0, 0))
    if since > torch_private.TORCH_VERSION:
        assert torch_private.find(name) is None
    else:
        getattr(torch_private, name)


@pytest.mark.parametrize("name", jax_private.NAMES)
def test_this_jax_has_it(name: str) -> None:
    getattr(jax_private, name)


WAITED_FOR = [
    value
    for name, value in vars(torch_private).items()
    if name.isupper() and name not in torch_private.NAMES and isinstance(value, str)
]


@pytest.mark.parametrize("module", [*WAITED_FOR, torch_private.debug_mode()])
def test_this_torch_has_the_module(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("name", torch_private.OPTIMIZER_FUNCTIONS)
def test_this_torch_has_the_optimizer(name: str) -> None:
    module = importlib.import_module(f"torch.optim.{name}")
    names = torch_private.OPTIMIZER_FUNCTIONS[name]
    assert [each for each in names if not hasattr(module, each)] == []


def test_values_that_change() -> None:
    assert not torch_private.is_in_forward_ad()
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.is_in_forward_ad()
    assert not torch_private.parametrizations_are_cached()
    with torch.nn.utils.parametrize.cached():
        assert torch_private.parametrizations_are_cached()
    before = torch_private.set_compiling(True)
    assert torch.compiler.is_compiling() and not before
    assert torch_private.set_compiling(before) and not torch.compiler.is_compiling()


def used(module: str, trees: dict[str, ast.Module]) -> set[str]:
    """The names that the package, and the module itself, take out of ``module``."""
    found = set()
    own = ast.parse(Path(inspect.getfile(OURS[module])).read_text())
    for node in (node for tree in (*trees.values(), own) for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and node.module == f"xla_dtensor.base.{module}":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == module else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & OURS[module].NAMES.keys()  # `find`, `replace`
    return found


@pytest.mark.parametrize("module", OURS)
def test_no_name_is_misspelt(module: str, trees: dict[str, ast.Module]) -> None:
    """A module's ``__getattr__`` hides that from mypy."""
    assert used(module, trees) - vars(OURS[module]).keys() - OURS[module].NAMES.keys() == set()


@pytest.mark.parametrize("module", OURS)
def test_each_name_is_used(module: str) -> None:
    words: Counter[str] = Counter()
    for path in graph.modules().values():
        words.update(re.findall(r"\w+", path.read_text()))
    # Each is there as the key in its table.
    assert [name for name in OURS[module].NAMES if words[name] < 2] == []


# --- how they look names up ----------------------------------------------------------------------


@pytest.fixture
def borrowed(monkeypatch: pytest.MonkeyPatch) -> Any:
    shop = ModuleType("a_shop")
    shop.__version__ = "1.2"  # type: ignore[attr-defined]
    shop._Tool = type("_Tool", (), {"_price": 3})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_shop", shop)
    mine = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)
    places = {"price": "a_shop:_Tool._price", "shop": "a_shop", "colour": "a_shop:_Tool._colour"}
    return Borrowed("a_shop", places, "mine"), mine, shop


def test_a_name_is_looked_up_once(borrowed: Any) -> None:
    names, mine, shop = borrowed
    assert names.get("price") == 3 and mine.price == 3
    assert names.get("shop") is shop


def test_a_replaced_name_is_looked_up_again(borrowed: Any) -> None:
    names, mine, shop = borrowed
    names.get("price")
    names.replace("price", 4)
    assert not hasattr(mine, "price") and names.get("price") == shop._Tool._price == 4


def test_what_a_version_lacks_is_said(borrowed: Any) -> None:
    names, _, _ = borrowed
    with pytest.raises(ImportError, match=r"^a_shop 1\.2 has no a_shop:_Tool\._colour, which "):
        names.get("colour")
    assert names.find("colour") is None
    with pytest.raises(AttributeError, match="'mine' has no attribute 'size'"):
        names.get("size")
