"""``torch.xla`` and ``torch.accelerator``: memory, streams, events, names; pinned memory."""

import gc
import pickle
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax._src import dispatch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import xla_dtensor as xd

MEGABYTE = 2**20


@pytest.fixture(params=["torch.xla", "torch.accelerator"])
def module(request):
    return torch.xla if request.param == "torch.xla" else torch.accelerator


@pytest.fixture
def nothing_else():
    """What other tests have left in caches goes before, and not in the middle: a collection of all
    that a worker has, seconds, so it is for tests of memory alone."""
    xd.debug.clear_caches()
    gc.collect()


@pytest.mark.one_in(2)
def test_memory_is_that_of_the_fullest_device(nothing_else, module, mesh_2x4):
    torch.xla.synchronize()  # what waits keeps its inputs alive
    gc.collect()
    before = module.memory_allocated()
    whole = torch.zeros(MEGABYTE, dtype=torch.uint8, device="xla")
    assert module.memory_allocated() >= before + MEGABYTE
    del whole
    gc.collect()
    assert before - MEGABYTE / 2 < module.memory_allocated() < before + MEGABYTE / 2
    before = module.memory_allocated()
    sharded = xd.distribute_tensor(
        torch.zeros(8, MEGABYTE, dtype=torch.uint8), mesh_2x4, [xd.Shard(0), xd.Shard(0)]
    )
    gc.collect()  # the tensor that it was made of
    grown = module.memory_allocated() - before
    assert 0.9 * MEGABYTE <= grown < 2 * MEGABYTE, sharded.shape
    statistics = module.memory_stats()
    assert statistics["allocated_bytes.all.current"] == module.memory_allocated()
    assert len(torch.xla.memory_stats()["devices"]) == len(jax.devices())


@pytest.mark.one_in(8)
def test_the_peak_stays_until_it_is_reset(nothing_else, module):
    gc.collect()
    module.reset_peak_memory_stats()
    before = module.max_memory_allocated()
    large = torch.zeros(3 * MEGABYTE, dtype=torch.uint8, device="xla")
    assert module.max_memory_allocated() >= before + 3 * MEGABYTE
    peak = module.max_memory_allocated()
    del large
    gc.collect()
    assert module.memory_allocated() < peak == module.max_memory_allocated()
    assert module.max_memory_reserved() >= module.memory_reserved()
    module.reset_peak_memory_stats()
    module.reset_accumulated_memory_stats()
    module.empty_cache()
    assert module.max_memory_allocated() == module.memory_allocated() < peak


def test_free_memory_and_names():
    free, total = torch.xla.mem_get_info()
    assert 0 < free < total
    properties = torch.xla.get_device_properties("xla:0")
    assert properties.name == torch.xla.get_device_name() == jax.devices()[0].device_kind
    assert (properties.total_memory, properties.count) == (total, len(jax.devices()))
    assert torch.xla.is_bf16_supported() and torch.xla.is_available()
    for ask in (torch.xla.get_device_name, torch.xla.memory_allocated, torch.xla.synchronize):
        with pytest.raises(xd.UnsupportedOpError, match="there is no device xla:5"):
            ask(5)


def test_memory_in_a_compiled_step_is_refused():
    @xd.compile
    def step(x):
        return x * torch.xla.memory_allocated()

    with pytest.raises(xd.DataDependentError, match="how much memory is in use"):
        step(torch.ones(3, device="xla"))


def test_streams_are_one_order():
    side = torch.xla.Stream()
    main = torch.xla.current_stream()
    side.wait_stream(main)
    with torch.xla.stream(side) as entered:
        assert entered is side is torch.xla.current_stream()
        x = torch.ones(4, device="xla") * 3
        with side, torch.xla.stream(None):
            assert torch.xla.current_stream() is side
    assert torch.xla.current_stream() == main == torch.xla.default_stream()
    main.wait_stream(side)
    x.record_stream(main)
    side.synchronize()
    assert side.query() and isinstance(side, torch.Stream) and x.sum().item() == 12
    torch.xla.set_stream(side)
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.xla.current_stream() is side))
    thread.start()
    thread.join()
    assert torch.xla.current_stream() is side is torch.accelerator.current_stream()
    assert found == [False]
    torch.xla.set_stream(main)


def test_a_stream_that_is_left_by_an_error():
    side, before = torch.xla.Stream(), torch.xla.current_stream()
    with pytest.raises(ZeroDivisionError), torch.xla.stream(side):
        1 / 0  # noqa: B018
    assert torch.xla.current_stream() == before and torch.xla.current_stream() is not side


def test_events_measure_what_the_devices_did():
    start, end = (torch.xla.Event(enable_timing=True) for _ in range(2))
    x = torch.ones(400, 400, device="xla")
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(end)
    (x @ x).sum()
    start.record()
    for _ in range(20):
        x = x @ x / 400
    torch.xla.current_stream().record_event(end)
    end.synchronize()
    assert x.jax_array.is_ready() and start.query() and end.query()
    assert 0 < start.elapsed_time(end) < 60_000
    assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_torchs_own_name_for_an_event():
    for made in (torch.Event("xla"), torch.Event(torch.device("xla"), enable_timing=True)):
        assert isinstance(made, torch.xla.Event) and isinstance(made, torch.Event)
    start, end = (torch.Event("xla", enable_timing=True) for _ in range(2))
    start.record()
    y = torch.ones(400, 400, device="xla") @ torch.ones(400, 400, device="xla")
    end.record()
    assert y.jax_array.is_ready() and 0 < start.elapsed_time(end) < 60_000
    other = torch.Event("cpu")
    assert isinstance(other, torch.Event) and not isinstance(other, torch.xla.Event)
    assert other.device.type == "cpu"

    assert isinstance(torch.xla.current_stream().record_event(), torch.Event)


def test_an_event_without_timing():
    event = torch.xla.Event()
    assert event.query()
    y = torch.ones(200, 200, device="xla") @ torch.ones(200, 200, device="xla")
    event.record()
    event.wait()
    event.synchronize()
    assert event.query() and y.jax_array.is_ready()
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        event.elapsed_time(event)

    @xd.compile
    def step(x):
        event.record()
        return x + 1

    with pytest.raises(xd.DataDependentError, match="when an event is recorded"):
        step(torch.ones(3, device="xla"))


def test_seeds():
    torch.xla.seed_all()
    one = torch.xla.initial_seed()
    torch.xla.seed()
    assert torch.xla.initial_seed() != one
    torch.xla.manual_seed_all(7)
    (state,) = torch.xla.get_rng_state_all()
    drawn = torch.rand(3, device="xla").tolist()
    torch.xla.set_rng_state_all([state])
    assert torch.rand(3, device="xla").tolist() == drawn


@pytest.mark.slow
def test_the_method_named_like_the_device():
    x = torch.arange(3.0)
    assert x.xla().device == x.xla(0).device == x.xla("xla").device == torch.device("xla:0")
    on_device = x.xla(non_blocking=True)
    assert on_device.xla() is on_device
    model = nn.Linear(3, 3)
    assert model.xla() is model and model.weight.device.type == "xla"
    packed = nn.utils.rnn.pack_sequence([x.reshape(3, 1)]).xla()
    assert packed.data.device.type == "xla"
    with pytest.raises(xd.UnsupportedOpError, match="there is no device xla:2"):
        x.xla(2)


def test_pinning_copies():
    x = torch.arange(6.0).reshape(2, 3).t()
    pinned = x.pin_memory()
    assert torch.equal(pinned, x) and pinned.stride() == x.stride() and not pinned.is_pinned()
    x.zero_()
    assert pinned.sum().item() == 15
    assert torch.equal(pinned.to("xla", non_blocking=True).cpu(), pinned)
    parameter = nn.Parameter(torch.ones(2))
    assert not parameter.pin_memory().requires_grad
    on_device = torch.ones(2, device="xla")
    assert not on_device.is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        on_device.pin_memory()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_pins(workers):
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    loader = DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers)
    sums = [(x.to("xla", non_blocking=True).sum().item(), y.tolist()) for x, y in loader]
    assert sums == [(6.0, [0, 1, 2, 3]), (22.0, [4, 5, 6, 7])]


class OnDevice(torch.utils.data.Dataset):
    """A dataset whose workers would use the device."""

    def __init__(self, use):
        self.data, self.use = torch.arange(8.0).to("xla"), use
        self.data.loss = (self.data.clone().requires_grad_() * 3).sum().cpu()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.use(self.data, index)


USES = {
    "indexing": lambda data, index: data[index],
    "reading": lambda data, index: data.tolist()[index],
    "moving": lambda data, index: torch.ones(3).to("xla").cpu(),
    "making": lambda data, index: torch.zeros(2, device="xla").cpu(),
    "printing": lambda data, index: torch.tensor(len(repr(data))),
    "backward": lambda data, index: data.loss.backward(),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_workers_that_use_the_device_raise_and_do_not_hang(use):
    loader = DataLoader(OnDevice(USES[use]), batch_size=4, num_workers=1, timeout=60)
    with pytest.raises(RuntimeError, match="Cannot use xla tensors in a forked subprocess"):
        list(loader)
    assert not torch.xla._is_in_bad_fork()
    assert torch.ones(2, device="xla").sum().item() == 2


TRAINS_IN_A_WORKER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import xla_dtensor


class OnCpu(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        model(torch.full((2,), float(index))).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        return model.weight.detach()


torch.ones(2, device="xla").sum().item()
(found,) = DataLoader(OnCpu(), batch_size=2, num_workers=1, timeout=60)
assert torch.equal(found, torch.tensor([[[1.0, 1.0]], [[-1.0, -1.0]]])), found
"""


@pytest.mark.slow
def test_workers_may_train_on_the_cpu():
    """accelerate's ``notebook_launcher`` forks, too, after the devices were used. In a process of
    its own: once there were gradients on a device, torch refuses it (its engine has threads)."""
    done = subprocess.run(
        [sys.executable, "-c", TRAINS_IN_A_WORKER], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


ENDS_IN_A_FORK = """
import os, sys, warnings
import torch, xla_dtensor

warnings.simplefilter("ignore")
x = torch.ones(2, device="xla")
x.sum().item()
child = os.fork()
if not child:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""


def test_a_forked_child_ends_as_it_says() -> None:
    """XLA's client waited for threads that the child hasn't: SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", ENDS_IN_A_FORK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_could_not_be_computed_is_told_once():
    """Who keeps the array (the last exception's traceback does) can save a checkpoint later."""

    def fail(x):
        raise ValueError("of this callback")

    def called(x):
        return jax.pure_callback(fail, x, x)

    mesh = jax.make_mesh((8,), ("a",))
    ones = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("a")))
    kept = jax.jit(jax.shard_map(called, mesh=mesh, in_specs=P("a"), out_specs=P("a")))(ones)
    with pytest.raises(RuntimeError, match="of this callback"):
        torch.xla.synchronize()
    torch.xla.synchronize()
    torch.xla.Stream().synchronize()
    with pytest.raises(RuntimeError, match="of this callback"):
        kept.block_until_ready()
    dispatch.runtime_tokens.clear()  # or JAX tells it once more when the process exits


def test_classes_of_tensors_are_torchs(mesh_2x4: Any) -> None:
    """opt_einsum gave arrays of NumPy's for tensors whose class is of another package."""
    import opt_einsum

    x, y = torch.randn(3, 4), torch.randn(4, 5)
    place = lambda t: distribute_tensor(t, mesh_2x4, [Shard(0), Replicate()])
    for put in (lambda t: t.to("xla"), place):
        found = opt_einsum.contract("ij,jk->ik", put(x), put(y))
        assert type(found) is type(put(x))
        torch.testing.assert_close(found.cpu(), x @ y)
        cls = type(found)
        assert cls.__module__.partition(".")[0] == "torch"
        assert pickle.loads(pickle.dumps(cls)) is cls and getattr(torch.xla, cls.__name__) is cls
    assert not hasattr(torch.xla, "NoSuchTensor")
