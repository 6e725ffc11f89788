"""Shared fixtures: simulated devices, meshes, placements, and a compilation cache."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before JAX starts: enough threads for XLA's CPU collectives, and the devices.
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# What torch computes runs in one thread: those of a worker for each core wait for each other, which
# takes a fifth more of the cores' time, and much more beside other work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiled steps look at indices, too: a test that has one out of range by mistake fails.
os.environ.setdefault("XLA_DTENSOR_CHECKS", "all")
# A test that expects one program mustn't pass by what a step falls back to; those of that say so.
os.environ.setdefault("XLA_DTENSOR_WATCH", "trace")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")  # of child processes

import jax
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from tests import quick_jax
from xla_dtensor.execution import lazy
from xla_dtensor.rules import registry
from xla_dtensor.runtime import live_programs, xla_flags

if os.environ["JAX_PLATFORMS"] == "cpu":
    xla_flags.add(xla_flags.LLVM_ON_CPUS)  # as the package does where it starts JAX
    if "XLA_DTENSOR_TESTS_OPTIMIZED" not in os.environ:
        xla_flags.add(*xla_flags.QUICK_COMPILES)
quick_jax.start()

MESHES = {
    "8": ((8,), ("x",)),
    "2x4": ((2, 4), ("dp", "tp")),
    "4x2": ((4, 2), ("dp", "tp")),
    "2x2x2": ((2, 2, 2), ("pp", "dp", "tp")),
    "1": ((1,), ("x",)),
}


def make_mesh(name: str) -> DeviceMesh:
    """The mesh called ``name`` in `MESHES`, or one of any other shape (``"5"``, ``"5x1"``)."""
    if name in MESHES:
        shape, names = MESHES[name]
    else:
        shape = tuple(map(int, name.split("x")))
        names = tuple(f"d{i}" for i in range(len(shape)))
    return xd.init_device_mesh("xla", shape, mesh_dim_names=names)


@pytest.fixture
def strict_eager() -> Iterator[None]:
    """Every eager operation is launched where it stands: for tests that count launches, or look at
    what is in a tensor's storage."""
    lazy.flush()
    with xd.config.override(eager="strict"):
        yield


@pytest.fixture(params=list(MESHES))
def mesh(request: pytest.FixtureRequest) -> DeviceMesh:
    """Each of the meshes that everything is tested on."""
    return make_mesh(request.param)


@pytest.fixture
def mesh_2x4() -> DeviceMesh:
    """A (2, 4) mesh with dims dp and tp."""
    return make_mesh("2x4")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, help="one test in so many, by its name")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark the variants that ``one_in`` leaves out as slow; of each test one or more stays. With
    ``--one-in n`` a sample of what ``-m`` then leaves, the same one in every process."""
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in") and not item.get_closest_marker("slow"):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in variants.values():
        marker = group[0].get_closest_marker("one_in")
        assert marker is not None
        (count,) = marker.args
        kept = [item for item in group if zlib.crc32(item.nodeid.encode()) % count == 0]
        for item in set(group) - set(kept or group[:1]):
            item.add_marker("slow")
    yield  # pytest looks at `-m`
    n = config.getoption("--one-in")
    if n > 1:
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % n == 0]


@pytest.fixture(autouse=True)
def _seed() -> None:
    """As `torch.manual_seed` does, which also writes down where it was called, in text, for each
    kind of device that isn't here, and keeps that: a third of what a short test takes."""
    torch.default_generator.manual_seed(0)
    torch.get_device_module("xla").manual_seed_all(0)


# A program for eight simulated devices takes more than a megabyte. Few tests use those of another.
_PROGRAMS = 300


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    """A worker that has run thousands of tests doesn't hold the programs of all of them."""
    yield
    if live_programs()[0] > _PROGRAMS:
        jax.clear_caches()  # those of tests that call JAX
        xd.debug.clear_caches()


@pytest.fixture
def own_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """`DFunction` ops registered in the test are forgotten after it; other modules' stay."""
    from xla_dtensor.custom_ops import distributed_op

    monkeypatch.setattr(distributed_op, "OPS", distributed_op.OPS.copy())


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the programs that are compiled from now on, before XLA has seen them."""
    import jax

    texts: list[str] = []
    compile_ = jax.stages.Lowered.compile

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        texts.append(self.as_text())
        return compile_(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    return texts


@pytest.fixture
def scratch() -> Iterator[None]:
    """Rules registered in the test are forgotten after it."""
    import xla_dtensor.custom_ops.jax_function  # (what they register stays)
    import xla_dtensor.rules.paddle  # noqa: F401

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_RULES", registry._RULES.copy())
        patch.setattr(registry, "_USER_RULES", registry._USER_RULES.copy())
        yield
    registry.changes.tell()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three operations and more are launched together."""
    lazy.flush()
    monkeypatch.setattr(xd.config, "eager", "lazy")
    monkeypatch.setattr(lazy, "FEW", 2)
    yield
    lazy.flush()


@pytest.fixture
def compiles() -> Iterator[Callable[[], int]]:
    """How many programs XLA has compiled since the last call."""
    count = [0]

    def listen(name: str, seconds: float, **kwargs: Any) -> None:
        count[0] += "backend_compile" in name

    def take() -> int:
        lazy.flush()
        taken, count[0] = count[0], 0
        return taken

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield take
    jax.monitoring.unregister_event_duration_listener(listen)
