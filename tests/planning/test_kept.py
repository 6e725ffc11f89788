"""What compilers have said is kept between runs, and found for the same program alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard, zeros

import xla_dtensor as xd
from tests.planning.gpus import needs_gpu_compiler
from tests.planning.test_abstract import make_mesh
from tests.planning.test_plan import step_of
from xla_dtensor.planning import kept, planner
from xla_dtensor.planning.kept import Said
from xla_dtensor.planning.memory import Memory
from xla_dtensor.runtime import program_cache
from xla_dtensor.runtime.topologies import topology


def said(text: str = "HloModule step") -> Said:
    memory = Memory(4, 8, 0, 16, 28, None, largest=("16 bytes of %dot",))
    return Said(memory, text, {"flops": 2.0}, ("a note",))


class Compiler:
    """Counts how often it is asked."""

    def __init__(self, answer: Said) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self) -> Said:
        self.asked += 1
        return self.answer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(program_cache, "folder_of_plans", lambda asked: tmp_path / "plans")
    return tmp_path / "plans"


def test_asked_once(folder: Path) -> None:
    compiler = Compiler(said())
    for _ in range(2):
        assert kept.said("a", compiler) == said()
    assert compiler.asked == 1
    other = Compiler(said("another"))
    assert kept.said("b", other).text == "another" and other.asked == 1


@pytest.mark.parametrize("where", [None, Path("/proc/nobody/can/write")])
def test_nothing_is_kept_where_nothing_is_to_be(where: Path | None, monkeypatch: Any) -> None:
    compiler = Compiler(said())
    monkeypatch.setattr(program_cache, "folder_of_plans", lambda asked: where)
    assert kept.said("a", compiler) == kept.said("a", compiler)
    assert compiler.asked == 2


@pytest.mark.parametrize("left", [b"", b"half", None])
def test_half_a_file(folder: Path, left: bytes | None) -> None:
    compiler = Compiler(said())
    kept.said("a", compiler)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:40] if left is None else left)
    assert kept.said("a", compiler) == said() and compiler.asked == 2
    assert kept.said("a", compiler) == said() and compiler.asked == 2


def test_what_was_not_used_for_longest_goes(folder: Path, monkeypatch: Any) -> None:
    compiler = Compiler(said())
    for age, key in enumerate("abc"):
        kept.said(key, compiler)
        file = folder / f"{key}.plan.gz"
        os.utime(file, (age, age))
    monkeypatch.setattr(kept, "MAX_BYTES", 2.5 * file.stat().st_size)
    kept.said("a", compiler)  # used again
    kept.said("d", compiler)
    assert {path.name[0] for path in folder.iterdir()} == {"a", "d"}


def test_what_makes_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    there = topology("cpu:8")

    def digest(scale: float = 2.0, scope: str = "a", order: int = 1, **given: Any) -> str:
        def function(x: Any) -> Any:
            with jax.named_scope(scope):
                return x * scale

        lowered = jax.jit(function).lower(jnp.ones(3))
        options, available = given.get("options", {}), given.get("available")
        devices = there.devices[::order]
        return kept.digest(lowered, options, given.get("on", there), devices, available)

    found = [
        *(digest(), digest(scale=3.0), digest(scope="b"), digest(order=-1)),
        *(digest(options={"xla_a": 1}), digest(available=8.0), digest(on=topology("cpu:4"))),
    ]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--a")
    found.append(digest())
    assert len({*found}) == len(found)
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert digest() == found[0]

    def by_another_function() -> str:
        return digest()

    assert by_another_function() == found[0]


@needs_gpu_compiler
def test_a_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is the first one, and no compiler is asked."""

    def planned(width: int = 64) -> str:
        with xd.abstract("h100:1x8"):
            model = xd.distribute_module(nn.Linear(width, width), make_mesh())
            x = zeros(16, width, device_mesh=make_mesh(), placements=[Shard(0), Replicate()])
            return xd.plan(step_of(model), x).as_json()

    first = planned()
    assert len([*folder.iterdir()]) == 1
    asked: list[Any] = []
    original = planner._asked
    monkeypatch.setattr(planner, "_asked", lambda *a: asked.append(a) or original(*a))
    assert planned() == first and not asked
    assert planned(128) != first and len(asked) == 1
