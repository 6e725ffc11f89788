"""Functions that get other code, and modules that are waited for."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from xla_dtensor.integration.patching.take_over import take_over


def plain(x: int, y: int = 2, *, z: int = 3) -> tuple[int, int, int]:
    """What it does."""
    return x, y, z


def test_a_plain_function() -> None:
    imported, signature = plain, inspect.signature(plain)
    seen: list[Any] = []

    def handler(original: Any, args: Any, kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return "ours" if args == (0,) else original(*args, **kwargs)

    take_over(plain, handler)
    take_over(plain, lambda *_: "a second time")
    assert plain is imported and imported(0) == "ours"  # type: ignore[comparison-overlap]
    assert imported(1, z=5) == (1, 2, 5) and imported(x=4, y=6) == (4, 6, 3)
    assert seen[1:] == [((1,), {"z": 5}), ((), {"x": 4, "y": 6})]
    assert inspect.signature(plain) == signature
    assert plain.__name__ == "plain" and plain.__doc__ == "What it does."
    assert pickle.loads(pickle.dumps(plain)) is plain
    with pytest.raises(TypeError, match="plain\\(\\)"):
        imported()  # type: ignore[call-arg]


def test_closures_and_methods() -> None:
    """Variables of the function, also the one of ``super()``, are there for what it did."""
    factor = 2

    def inner(x: int) -> int:
        return factor * x

    @wraps(inner)
    def outer(*args: Any) -> int:
        return inner(*args) + factor

    take_over(outer, lambda original, args, kwargs: -original(*args, **kwargs))
    factor = 3
    assert outer(5) == -18 and list(inspect.signature(outer).parameters) == ["x"]

    class Base:
        def __init__(self, x: int) -> None:
            self.x = x

    class Derived(Base):
        def __init__(self, x: int) -> None:
            super().__init__(x + 1)

    take_over(Derived.__init__, lambda original, args, kwargs: original(*args, **kwargs))
    assert Derived(x=1).x == 2


_WAITING = """
import sys
from xla_dtensor.integration.patching.on_import import on_import

seen = []
on_import("waited_for", lambda module: seen.append((module.value, "waited_for" in sys.modules)))
on_import("waited_for", lambda module: seen.append("again"))
try:
    import is_not_there
except ModuleNotFoundError:
    pass
import waited_for
assert seen == [(3, True), "again"], seen
on_import("waited_for", lambda module: seen.append("now"))
assert seen[-1] == "now"
"""


def test_on_import(tmp_path: Path) -> None:
    (tmp_path / "waited_for.py").write_text("value = 3\n")
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r})\n{_WAITING}"],
        check=True,
    )
