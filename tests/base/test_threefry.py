"""Threefry by numpy, and what random numbers do on a platform that computes it wrong."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.base.random import threefry


@pytest.mark.parametrize(("key", "counter", "result"), threefry.VECTORS)
def test_numpys_is_random123s(
    key: tuple[int, int], counter: tuple[int, int], result: tuple[int, int]
) -> None:
    found = threefry.threefry(key, np.array([counter, counter], np.uint32).T)
    assert found.T.tolist() == [list(result), list(result)]


def test_bits_are_jaxs() -> None:
    key = jax.random.wrap_key_data(np.array([5, 6], np.uint32), impl="threefry2x32")
    assert threefry.bits((5, 6), 1000).tolist() == jax.random.bits(key, (1000,)).tolist()


def _two_keys() -> tuple[jax.Array, jax.Array]:
    words = np.array([7, 0xFFFFFFFE], np.uint32)
    return tuple(
        jax.random.wrap_key_data(words, impl=impl)
        for impl in ("threefry2x32", threefry.written_out())
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 5), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.float32, float])
def test_written_out_it_gives_jaxs_numbers(shape: tuple[int, ...], dtype: type) -> None:
    with jax.enable_x64(True):
        draw = jax.random.uniform if np.dtype(dtype).kind == "f" else jax.random.bits
        theirs, ours = (draw(key, shape, dtype) for key in _two_keys())
    assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


def test_written_out_it_gives_jaxs_keys() -> None:
    for make in (
        lambda key: jax.random.split(key, (2, 3)),
        lambda key: jax.random.fold_in(key, 2**31 + 5),
        lambda key: jax.vmap(lambda k: jax.random.fold_in(k, 1))(jax.random.split(key)),
    ):
        theirs, ours = (jax.random.key_data(make(key)) for key in _two_keys())
        assert np.array_equal(ours, theirs)
    seeds = [jax.random.key(2**31 + 9, impl=impl) for impl in (None, threefry.written_out())]
    assert np.array_equal(*map(jax.random.key_data, seeds))


def test_written_out_beyond_32_bits() -> None:
    """Positions have 64 bits where there are so many."""
    key = _two_keys()[1]
    with jax.enable_x64(True):
        made = jax.make_jaxpr(lambda: jax.random.bits(key, (2**20, 2**14)))()
    assert "u64[1048576,16384]" in str(made)


def test_this_backend_knows_the_answers() -> None:
    got, right = threefry.known_answers()
    assert got.tolist() == right.tolist()
    assert len(set(got.tolist())) == len(got) == 126


class Asked:
    """`known_answers`, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, self.answers = 0, threefry.known_answers
        monkeypatch.setattr(threefry, "_checked", set())
        monkeypatch.setattr(threefry, "known_answers", self)

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        self.times += 1
        return self.answers()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """On a platform that nobody knows."""
    monkeypatch.setattr(threefry, "platform", lambda: "npu")
    return Asked(monkeypatch)


def incomplete() -> tuple[np.ndarray, np.ndarray]:
    right = np.array([7, 8, 0xFFFFFFFF], np.uint32)
    return right & 0xFFFF, right


def unknown() -> tuple[np.ndarray, np.ndarray]:
    raise NotImplementedError("no lowering of shift_left\nat all")


WRONG = "1 of 3 known answers are wrong, the first 0x0000ffff in place of 0xffffffff"
MESSAGE = (
    "random numbers on the platform 'npu': it doesn't compute Threefry, which they are made "
    "by: {}. "
    'Make them on the CPU and distribute them, distribute_tensor(torch.rand(..., device="cpu"), '
    "mesh, placements), and set dropout to 0, which isn't available here. "
    "python -m xla_dtensor.debug.device says what else this platform can't do"
)

DRAWS = {
    "rand": lambda n: torch.rand(n, device="xla"),
    "randn of a mesh": lambda n: torch.distributed.tensor.randn(
        n, device_mesh=make_mesh("8"), placements=[xd.Shard(0)]
    ),
    "dropout": lambda n: torch.nn.functional.dropout(torch.ones(n, device="xla")),
    "in place": lambda n: torch.empty(n, device="xla").normal_(),
    "generator": lambda n: torch.randperm(n, device="xla", generator=torch.Generator("xla")),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    # A compiled step draws from the device's own stream alone.
    [(name, c) for name in DRAWS for c in (False, True) if not (c and name == "generator")],
)
def test_random_numbers_are_refused(name: str, compiled: bool, asked: Asked) -> None:
    """Each time, where they are asked for; and nothing else is."""
    size = 41 + 2 * [*DRAWS].index(name) + compiled  # that no other test has a plan for
    draw = DRAWS[name]
    step = xd.compile(lambda: draw(size)) if compiled else lambda: draw(size)
    asked.answers = incomplete
    state = torch.xla.get_rng_state()
    for _ in range(2):
        with pytest.raises(xd.RandomNumbersError) as raised:
            step()
        assert str(raised.value).partition("\n")[0] == MESSAGE.format(WRONG)
    assert torch.equal(torch.xla.get_rng_state(), state)
    x = torch.ones(size, device="xla")
    assert (x + 1).tolist() == [2] * size
    there = xd.distribute_tensor(torch.rand(size, device="cpu"), make_mesh("8"), [xd.Shard(0)])
    assert there.shape == (size,)
    asked.answers = lambda: (np.ones(1), np.ones(1))  # now it does
    assert step().numel() == size


def test_a_program_that_fails_is_as_good_as_wrong(asked: Asked) -> None:
    asked.answers = unknown
    with pytest.raises(xd.RandomNumbersError) as raised:
        torch.rand(61, device="xla")
    failed = "the program that tries it fails (NotImplementedError: no lowering of shift_left)"
    assert str(raised.value) == MESSAGE.format(failed)
    assert isinstance(raised.value.__cause__, NotImplementedError)


def test_once_in_a_process(asked: Asked) -> None:
    for n in (63, 64, 64, 65):
        torch.rand(n, device="xla").tolist()
    assert xd.compile(lambda: torch.rand(66, device="xla"))().numel() == 66
    assert asked.times == 1


@pytest.mark.parametrize("platform", sorted(threefry.KNOWN_RIGHT))
def test_never_where_it_is_known(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threefry, "platform", lambda: platform)
    asked = Asked(monkeypatch)
    threefry.check_platform()
    assert asked.times == 0


def test_simulated_devices_are_known() -> None:
    assert threefry.platform() == "cpu"


def test_the_answers_are_found_while_anything_is_traced() -> None:
    """Programs with random numbers are traced under each of these."""
    found = []

    def traced(x: jax.Array) -> jax.Array:
        got, right = threefry.known_answers()
        found.append(got.tolist() == right.tolist())
        return x * 2

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    cut = jax.shard_map(traced, mesh=mesh, in_specs=spec, out_specs=spec)
    x = np.ones(8)
    for wide in (False, True):
        with jax.enable_x64(wide):
            assert len(jax.make_jaxpr(cut)(x).eqns) == 1  # and none of ours
            assert len(jax.make_jaxpr(jax.vmap(traced))(x).eqns) == 1
            jax.eval_shape(jax.grad(traced), 1.0)
    assert found == [True] * 6


def test_calls_of_compiled_programs_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    step = xd.compile(lambda: torch.rand(67, device="xla"), audit=0)  # it traces anew
    for _ in range(3):
        step()
        torch.rand(68, device="xla").tolist()

    def never() -> None:
        raise AssertionError

    monkeypatch.setattr(threefry, "check_platform", never)
    for _ in range(3):
        step()
        torch.rand(68, device="xla").tolist()
