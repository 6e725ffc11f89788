"""Eager programs are found by other processes, by what they compute and nothing else."""

from __future__ import annotations

import functools
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F

import xla_dtensor as xd
from xla_dtensor.execution import lazy
from xla_dtensor.lowering.registry import _LOWERINGS, Lowering, find_lowering
from xla_dtensor.runtime import program_cache
from xla_dtensor.runtime.kept import environment


def inverse(device: str) -> float:
    """Of LAPACK, which isn't there before JAX has lowered something that needs it."""
    x = torch.arange(9.0).reshape(3, 3).to(device) + 5 * torch.eye(3).to(device)
    return torch.linalg.inv(x).sum().item()


def work(device: str) -> list[float]:
    """What eager programs look like: products, views, integers, writes, numbers, gradients."""
    x = (torch.arange(24.0).reshape(4, 6) / 7).to(device)
    n = torch.arange(4).to(device)
    found: list[float] = []
    for t in range(3):
        y = ((x @ x.t()).softmax(-1) * (0.5 + t)) @ x[:, 1:4]
        x[:, t] += y.sum(1) / 100
        n = (n * 2 + t).clamp(0, 90)
        z = torch.cat([y, x[:, : t + 1]], 1).cumsum(0)
        found += [z.double().sum().item(), n.sum().item(), z[n % 4, 0].sum().item()]
    w = (torch.arange(15.0).reshape(3, 5) / 9).to(device).requires_grad_()
    F.gelu(torch.ones(2, 3).to(device) @ w).square().mean().backward()
    assert w.grad is not None
    return [*found, w.grad.sum().item()]


Run = Callable[[], tuple[list[float], int]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where they are kept."""
    monkeypatch.setattr(program_cache, "own_folder", tmp_path)
    monkeypatch.setattr(xd.config, "eager", "lazy")
    return tmp_path


@pytest.fixture
def run(folder: Path, compiles: Callable[[], int]) -> Run:
    """Does `work` as if in another process: what it found, and how many programs it compiled."""

    def once() -> tuple[list[float], int]:
        lazy.flush()
        xd.debug.clear_caches()
        compiles()
        return work("xla"), compiles()

    return once


def test_nothing_is_compiled_or_traced_again(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, compiled = run()
    assert compiled > 20 and first == pytest.approx(work("cpu"), rel=1e-5)
    traced: list[str] = []
    listen = lambda name, seconds, **kwargs: traced.append(name) if "trace" in name else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert run() == (first, 0)  # to the bit
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not traced
    monkeypatch.setattr(program_cache, "own_folder", None)
    found, again = run()
    assert found == first and again > compiled / 2


def test_random_numbers_are_the_same(run: Run, compiles: Callable[[], int]) -> None:
    found = []
    for _ in range(2):
        run()
        torch.manual_seed(3)
        x = F.dropout(torch.ones(5, 8).to("xla"), 0.3) * torch.randn(5, 8, device="xla")
        found.append((x.cpu(), compiles()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] and not found[1][1]


@pytest.mark.slow
def test_other_numbers_and_shapes(run: Run, compiles: Callable[[], int]) -> None:
    """Numbers are inputs; what differs in a shape, a dtype or a constant is another program."""
    run()
    x = torch.arange(6.0).reshape(2, 3).to("xla")
    for make in (
        lambda x: (x * 3 + 1).sum(0, keepdim=True).relu() @ x.t(),
        lambda x: (x * 3 + 1).sum(1, keepdim=True).relu().t() @ x,
        lambda x: (x.double() * 3 + 1).sum(0, keepdim=True).relu() @ x.double().t(),
        lambda x: (x * 3 - 1).sum(0, keepdim=True).relu() @ x.t(),
    ):
        for _ in range(2):
            assert torch.equal(make(x).cpu(), make(x.cpu()))
            lazy.flush()
            xd.debug.clear_caches()
    compiles()
    assert (x * 5 + 2).sum(0, keepdim=True).relu().sum().item() and compiles()  # ends elsewhere


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(torch, "__version__", "2.13.1"),
        lambda patch: patch.setattr(jax, "__version__", "0.10.3"),
        lambda patch: patch.setattr(environment, "machine", lambda: "another"),
        lambda patch: patch.setattr(environment, "_sources", functools.cache(lambda: "others")),
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_a=1"),
        lambda patch: patch.setenv("NPROC", "7"),
    ],
    ids=["torch", "JAX", "processor", "sources", "flags", "threads"],
)
def test_another_environment_finds_none(
    run: Run, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, compiled = run()
    change(monkeypatch)
    environment.forget()
    try:
        found, again = run()
        assert found == first and again > compiled / 2
        assert run() == (first, 0)
    finally:
        monkeypatch.undo()
        environment.forget()


@pytest.mark.slow
def test_settings_of_jax_make_other_programs(run: Run) -> None:
    first, compiled = run()
    with jax.default_matmul_precision("float32"):
        found, again = run()
        assert found == first and again > compiled / 2
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", not before)
    try:
        assert run()[1] > compiled / 2
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert run() == (first, 0)


def test_settings_that_change_meanwhile(folder: Path) -> None:
    """A program that was loaded for others isn't called."""
    x = torch.ones(3, device="xla")
    for _ in range(2):
        assert ((x + 1).cpu() == 2).all()
    with jax.disable_jit():
        assert ((x + 1).cpu() == 2).all()
    with jax.default_device(jax.devices()[-1]):
        assert ((x + 1).cpu() == 2).all()
    assert ((x + 1).cpu() == 2).all()


def test_every_line_of_the_package_counts() -> None:
    text = environment._sources()
    assert text is not None and len(text) == 64


@pytest.mark.slow
@pytest.mark.parametrize("unknown", ["edited", "no sources"])
def test_sources_that_are_not_what_runs(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    """A line saved while the process runs, or a program without sources: nothing is kept."""
    if unknown == "edited":
        monkeypatch.setattr(environment, "_IMPORTED", 0.0)
    else:
        monkeypatch.setattr(environment, "__file__", str(folder / "a" / "b" / "c.pyc"))
    environment.forget()
    try:
        first, compiled = run()
        found, again = run()
    finally:
        monkeypatch.undo()
        environment.forget()
    assert found == first and again > compiled / 2
    assert not (folder / "eager").exists()


_FLAGS = """
import os, torch, xla_dtensor as xd
from xla_dtensor.runtime.kept import environment
torch.ones(3, device="xla").sum().item()
os.environ["XLA_FLAGS"] = ""
environment.forget()
print(environment.words(xd.to_jax(torch.ones(3, device="xla")).device))
"""


@pytest.mark.slow
def test_flags_that_are_no_longer_in_the_variable() -> None:
    """A script takes them out of the environment of what it starts; XLA has read them."""
    found = set()
    for flags in ("--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math=false"):
        done = subprocess.run(
            [sys.executable, "-c", _FLAGS],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            check=True,
        )
        found.add(done.stdout.splitlines()[-1])
    assert len(found) == 2 and all(len(words) == 64 for words in found)


@pytest.mark.slow
def test_a_lowering_of_the_users_own_is_compiled(run: Run, compiles: Callable[[], int]) -> None:
    """What it does is known to this process alone."""
    name = "kept_programs::scaled"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "Meta", lambda x: torch.empty_like(x))
    for factor in (2.0, 3.0, 4.0, 5.0):

        def scaled(x: Any, factor: float = factor) -> Any:
            return x * factor

        if factor > 3:  # which gives it the name of the package's module
            relu = find_lowering("aten::relu.default")
            assert relu is not None
            scaled = functools.wraps(relu.function)(scaled)
        _LOWERINGS.add(f"{name}.default", Lowering(scaled), override=True)
        run()
        y = torch.ops.kept_programs.scaled(torch.ones(3).to("xla")) + 1
        assert y.sum().item() == 3 * (factor + 1) and compiles()


def test_spoilt_files(run: Run, folder: Path) -> None:
    """Half of them, none, no pickle, another's content: each is compiled again and then found."""
    first, compiled = run()
    files = sorted((folder / "eager" / "programs").iterdir())
    for number, file in enumerate(files):
        whole = file.read_bytes()
        spoilt = whole[: len(whole) // 2], b"", gzip.compress(b"no pickle"), whole
        file.write_bytes(spoilt[number % 4])
    (folder / "eager" / "proofs").write_bytes(b"\xff\xfe half a line")
    second, again = run()
    assert second == first and compiled / 2 < again < compiled
    assert run() == (first, 0)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it is used, all else is compiled, and nothing is said."""
    first, _ = run()
    for file in list((folder / "eager" / "programs").iterdir())[::2]:
        file.unlink()
    before = sorted(folder.rglob("*"))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("read only")

    for owner, name in ((os, "utime"), (Path, "write_bytes"), (Path, "open"), (Path, "mkdir")):
        monkeypatch.setattr(owner, name, refuse)
    second, compiled = run()
    monkeypatch.undo()
    assert second == first and compiled and sorted(folder.rglob("*")) == before


_PROGRAM = """
import json, sys
sys.path.insert(0, "")
import jax
count = [0]
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **kwargs: count.__setitem__(0, count[0] + ("backend_compile" in name))
)
from tests.runtime.test_kept_programs import inverse, work
print(json.dumps([work("xla"), count[0], inverse("xla")]))
"""


@pytest.mark.slow
def test_other_processes(tmp_path: Path) -> None:
    """Two at once, and one after them."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}

    def other(cache: Path) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=clean | {"JAX_PLATFORMS": "cpu", "XLA_DTENSOR_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(2) as pool:
        (found, *compiled, inverted), (same, *others, _) = pool.map(other, [tmp_path, tmp_path])
    assert sum(compiled + others) > 20  # each may have found what the other had just kept
    assert found == same == pytest.approx(work("cpu"), rel=1e-5)
    assert inverted == pytest.approx(inverse("cpu"))
    assert other(tmp_path) == [found, 0, inverted]
