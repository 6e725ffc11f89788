"""A minute of the fuzzer, and that it finds what is wrong, makes it small, and outlives it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz import judge, xla
from tests.fuzz.__main__ import Worker, main
from tests.fuzz.draw import EXCLUDED, MESHES, OPERATIONS
from tests.fuzz.program import Leaf, Program, made, on_cpu, packed
from tests.fuzz.run import WAYS, Failure, failures, run
from tests.fuzz.script import script
from tests.fuzz.seeds import draw
from tests.fuzz.shrink import shrunk
from xla_dtensor.execution import lazy, pieces

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "OFTEN", 0)
    monkeypatch.setattr(pieces, "OFTEN", 0)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("seed", range(16))
def test_programs(seed: int) -> None:
    program = draw(seed)
    wrong = [failure for failure in failures(program) if failure.kind != "refused"]
    assert not wrong, f"{program.told()}\n{wrong}"


def leaf(name: str, *shape: int, on: str = "[Replicate(), Replicate()]", grad: bool = True) -> Leaf:
    value = torch.arange(1.0, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape) / 8
    return Leaf(name, value, "torch.float32", on, grad)


LONG = Program(
    "2x4",
    (
        leaf("v0", 6, 4, on="[Shard(0), Partial('sum')]"),
        leaf("v1", 4, 6, on="[Shard(1), Shard(0)]"),
    ),
    (
        "v2 = v0.sin()",
        "v3 = v2 @ v1",
        "v4 = v3.softmax(0)",
        "v5, v6 = v1.split([1, 3], 0)",
        "v7 = redistribute(v4, [Shard(0), Shard(1)])",
        "v8 = v7.clone()",
        "v8[1:3].mul_(2.0)",
        "v9 = torch.cat([v8, v6], 0)",
    ),
    ("v5", "v9"),
    "v5.sum() + v9.sin().sum()",
)


def test_the_same_seed_is_the_same_program() -> None:
    """In another process, too, with other hashes."""
    code = (
        "import hashlib; from tests.fuzz.seeds import draw\n"
        "for seed in range(6): print(hashlib.sha256(draw(seed).told().encode()).hexdigest())"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [hashlib.sha256(draw(seed).told().encode()).hexdigest() for seed in range(6)]
    assert found.stdout.split() == here


def test_what_ran_before_changes_no_program() -> None:
    before = draw(93).told()
    program = Program("2x4", (leaf("v0", 4, 3),), ("v1 = rand(v0)",), ("v1",))
    assert failures(program, ["strict"]) == []
    assert draw(93).told() == before


@pytest.mark.slow
def test_everything_is_drawn() -> None:
    """Each family of operations, mesh and kind of layout, in few programs."""
    programs = [draw(seed) for seed in range(120)]
    text = "\n".join(program.told() for program in programs)
    assert {program.mesh for program in programs} == set(MESHES)
    wanted = "redistribute to_local from_local all_reduce all_gather topk sort scatter gather where"
    wanted += " cat split conv scaled_dot_product_attention layer_norm softmax einsum bmm linear"
    wanted += " cumsum logsumexp var vector_norm index_put index_select bfloat16 complex64 int64"
    wanted += " bool dropout rand as_strided unfold fft rfft irfft rfftn"
    missing = [word for word in wanted.split() if not re.search(rf"\b{word}|_{word}", text)]
    assert not missing
    for layout in ("[P", "[S0/", "[R]", "[Pmax]"):
        assert layout in text
    lengths = [len(program.lines) for program in programs]
    assert min(lengths) < 6 and max(lengths) > 20
    assert sum(bool(program.loss) for program in programs) > 50
    assert len(OPERATIONS) > 50


def test_what_is_left_out_says_why() -> None:
    assert all(re.fullmatch(r"F\d+", name) and reason for name, reason in EXCLUDED.items())


# The judge


def judged(change: Any) -> tuple[str, str] | None:
    program = LONG
    wanted, exact, got = on_cpu(program), on_cpu(program, wide=True), on_cpu(program)
    got.results = [(what, change(what, value.clone())) for what, value in got.results]
    return judge.first_wrong(program, got, wanted, exact)


def test_rounding_is_right() -> None:
    assert judged(lambda what, value: value) is None
    assert judged(lambda what, value: value * (1 + 1e-7)) is None


def at(wanted: str, change: Any) -> Any:
    return lambda what, value: change(value) if what == wanted else value


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("v9", lambda value: value + 0.01),
        ("v9", lambda value: value.double()),
        ("v9", lambda value: value[:1]),
        ("v9", lambda value: value.flip(0)),
        ("v9", lambda value: value * float("nan")),
        ("loss", lambda value: value * 1.001),
        ("afterwards v0", lambda value: value * 2),
        ("gradient of v1", lambda value: torch.zeros_like(value)),
        ("gradient of v0", lambda value: None),
    ],
)
def test_a_wrong_number_is_wrong(what: str, change: Any) -> None:
    found = judged(at(what, change))
    assert found is not None and found[0] == what


def test_whole_numbers_are_exact() -> None:
    program = Program("2x4", (leaf("v0", 4),), ("v1 = v0.detach().argsort(0)",), ("v1",))
    wanted, exact = on_cpu(program), on_cpu(program, wide=True)
    got = on_cpu(program)
    assert judge.first_wrong(program, got, wanted, exact) is None
    got.results[0][1][0] += 1
    assert judge.first_wrong(program, got, wanted, exact) is not None


def test_what_amplifies_rounding_is_right() -> None:
    """0 but for rounding, made large: no two orders of adding up agree."""
    lines = ("v1 = v0 / 3", "v2 = v1 + v1 + v1 - v0", "v3 = v2 * 1e6")
    program = Program("2x4", (leaf("v0", 9),), lines, ("v3",))
    wanted, exact, got = on_cpu(program), on_cpu(program, wide=True), on_cpu(program)
    got.results[0] = "v3", got.results[0][1] + torch.linspace(-0.05, 0.05, 9)
    assert judge.first_wrong(program, got, wanted, exact) is None
    got.results[0] = "v3", got.results[0][1] + 100
    assert judge.first_wrong(program, got, wanted, exact) is not None


# Finding, shrinking, telling


def test_each_way_finds_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sin` of xla tensors is given another lowering, as a bug would."""
    program = Program(
        "2x4",
        (leaf("v0", 4, 3),),
        ("v1 = torch.ops.aten.sin.default(v0)", "v2 = v1 * 2"),
        ("v2",),
        "v2.sum()",
    )
    assert failures(program) == []
    broken = lambda program, way: _off(run(program, way))
    monkeypatch.setattr("tests.fuzz.run.run", broken)
    found = failures(program)
    assert [(f.way, f.kind, f.what) for f in found] == [(way, "wrong", "v2") for way in WAYS]


def _off(result: Any) -> Any:
    what, value = result.results[0]
    result.results[0] = what, value + 0.5
    return result


def test_what_is_raised_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("v1 = redistribute(v0, [Partial('sum'), Replicate()])",)
    program = Program("2x4", (leaf("v0", 4, 3),), lines, ("v1",))
    assert {(f.kind, f.what) for f in failures(program)} == {("refused", "PlacementError")}

    def broken(program: Program, way: str) -> Any:
        raise KeyError("an internal one")

    monkeypatch.setattr("tests.fuzz.run.run", broken)
    assert {(f.kind, f.what) for f in failures(program)} == {("error", "KeyError")}


def test_shrinking() -> None:
    """By a fault that needs two lines and one layout; everything else goes."""

    def fails(program: Program) -> bool:
        on_cpu(program)
        text = program.text()
        cut = any("Shard" in leaf.placements for leaf in program.leaves)
        return ".softmax(" in text and ".mul_(2.0)" in text and cut

    assert fails(LONG)
    small = shrunk(LONG, fails, 30)
    assert fails(small)
    assert len(small.lines) <= 3 and len(small.leaves) == 1 and not small.loss, small.told()
    (last,) = small.leaves
    assert last.value.numel() <= 4 and last.placements.count("Replicate") == 1


def test_lines_say_what_they_make() -> None:
    assert made("v1, v2 = v0.sort(0)") == ["v1", "v2"]
    assert made("v1[0, :] = v2") == made("v1.add_(v2)") == made("torch.add(v0, v1, out=v2)") == []


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("strict", marks=pytest.mark.slow), "compiled"])
def test_the_script_runs_by_itself(way: str, tmp_path: Path) -> None:
    steps = (
        "v10 = to_local(v9, [Shard(1), Replicate()], None, mesh)",
        "v11 = from_local(all_reduce(v10, 'sum', mesh, 0), [Shard(1), Replicate()], mesh)",
    )
    program = dataclasses.replace(LONG, lines=(*LONG.lines, *steps), outputs=("v9", "v11"))
    path = tmp_path / "found.py"
    path.write_text(script(program, Failure(way, "wrong", "v9", ""), 3))
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", path],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    expected, got = shown.split("got, ")
    wanted = dict(on_cpu(program).results)
    for text in (expected, got):
        (numbers,) = re.findall(r"   v9 (.*)", text)
        torch.testing.assert_close(torch.tensor(json.loads(numbers)), wanted["v9"])
        (numbers,) = re.findall(r"gradient of v1 (.*)", text)
        torch.testing.assert_close(torch.tensor(json.loads(numbers)), wanted["gradient of v1"])


def test_whose_fault_it_is(tmp_path: Path) -> None:
    """XLA is not to blame for a right program, and is where layouts change its numbers."""
    import jax
    import jax.numpy as jnp

    path = tmp_path / "program.txt"
    program = Program(
        "2x4", (leaf("v0", 4, 4, on="[Shard(0), Shard(1)]"),), ("v1 = v0.cos()",), ("v1",)
    )
    assert "right by JAX alone" in xla.blamed(lambda: run(program, "lazy"), path)
    assert not path.exists()

    def dependent(x: jax.Array) -> jax.Array:
        # What a fault of the partitioner is to a program: a number that hangs on the layout.
        return x + jax.pure_callback(
            lambda: jnp.float32(next(numbers)), jax.ShapeDtypeStruct((), "float32")
        )

    numbers = iter(range(100))
    assert "XLA's fault" in xla.blamed(lambda: jax.jit(dependent)(jnp.ones(3)), path)
    assert "pure_callback" in path.read_text()


# The driver


DIES = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if asked["seed"] == 1: os.abort()
    if asked["seed"] == 2: time.sleep(60)
    print(json.dumps({"failures": [], "seconds": 1.0, "ends": asked["seed"] == 3}), flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr("tests.fuzz.__main__.TIMEOUT", 3)
    made = Worker([sys.executable, "-c", DIES])
    yield made
    made.stop()


def test_a_process_that_dies_is_a_failure(worker: Worker) -> None:
    kinds = [[f["what"] for f in worker.ask(seed=seed)["failures"]] for seed in range(6)]
    assert kinds == [[], ["died"], ["hung"], [], [], []]


def test_a_run_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.fuzz.__main__.COMMAND", (sys.executable, "-c", DIES))
    for first, count, extra in ((4, 1, []), (3, 4, ["--resume"]), (3, 9, ["--minutes", "0"])):
        options = ["--out", str(tmp_path), "--first", str(first), "--programs", str(count)]
        assert main([*options, *extra]) == 0
        if extra != ["--minutes", "0"]:
            assert f"{count} programs, 0 wrong" in capsys.readouterr().out
            record = (tmp_path / "record.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in record] == [4, 3, 5, 6]
    assert main(["--out", str(tmp_path), "--seed", "1"]) == 1
    assert "seed 1  died" in capsys.readouterr().out


def test_a_failure_is_shrunk_to_a_script(tmp_path: Path) -> None:
    """By a real worker: what was told of a program is what its script is made of."""
    lines = ("v1 = redistribute(v0, [Partial('sum'), Shard(0)])",)
    program = Program("2x4", (leaf("v0", 4, 3),), lines, ("v1",))
    (failure,) = failures(program, ["compiled"])
    worker = Worker()
    try:
        asked = {"program": packed(program), "shrink": dataclasses.asdict(failure), "seed": 0}
        found = worker.ask(**asked, within=20, path=str(tmp_path / "program.txt"))
    finally:
        worker.stop()
    assert "Partial('sum')" in found["script"] and "PlacementError" in found["text"]
