"""The processes meet, or say by name why they can't. Nothing here starts JAX."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import xla_dtensor as xd
from tests import launch
from xla_dtensor.runtime import distributed, rendezvous
from xla_dtensor.runtime.launchers import Launch, find

Error = xd.DistributedError


@pytest.fixture
def listening() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield other.getsockname()[1]


def torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, count: int, port: int) -> Launch:
    for name, value in launch.torchrun_variables(rank, count, port).items():
        monkeypatch.setenv(name, value)
    found = find(os.environ)
    assert found is not None
    return found


def raises(call: object, *words: str) -> None:
    began = time.monotonic()
    with pytest.raises(Error) as error:
        call()  # type: ignore[operator]
    for word in (*words, socket.gethostname()):
        assert word in str(error.value), str(error.value)
    assert time.monotonic() - began < 10


def test_a_port_in_use(listening: int) -> None:
    given = Launch("initialize()", 0, 2, f"localhost:{listening}")
    raises(
        lambda: rendezvous.check_free(f"localhost:{listening}", given),
        f"port {listening}",
        "coordinator_address=",
    )


def test_a_coordinator_that_is_not_there() -> None:
    port = launch.free_port()
    given = Launch("slurm", 1, 2, meeting="jax")
    raises(
        lambda: rendezvous.wait_until_there(f"localhost:{port}", given, 0.5),
        f"no coordinator at localhost:{port}",
        "JAX_COORDINATOR_ADDRESS",
    )


def test_a_store_whose_port_is_in_use(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    found = torchrun(monkeypatch, 0, 2, listening)
    raises(
        lambda: rendezvous.address_of_coordinator(found, 2),
        f"MASTER_PORT={listening}",
        "in use",
    )


def test_a_store_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torchrun(monkeypatch, 1, 2, launch.free_port())
    raises(lambda: rendezvous.address_of_coordinator(found, 2), "MASTER_ADDR=localhost", "RANK 0")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A store as torchrun's agent keeps it."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield store.port
    rendezvous._stores.clear()


def test_a_process_that_does_not_come(monkeypatch: pytest.MonkeyPatch, agent: int) -> None:
    found = torchrun(monkeypatch, 0, 3, agent)
    raises(lambda: rendezvous.address_of_coordinator(found, 1), "RANK 1, 2", "WORLD_SIZE=3")


def test_a_rank_asked_for_twice(monkeypatch: pytest.MonkeyPatch, agent: int) -> None:
    found = torchrun(monkeypatch, 0, 2, agent)
    with pytest.raises(Error):
        rendezvous.address_of_coordinator(found, 0.3)
    raises(
        lambda: rendezvous.address_of_coordinator(found, 1),
        "RANK=0 is asked for twice",
        f"(pid {os.getpid()})",
    )


def test_they_meet_in_the_store(monkeypatch: pytest.MonkeyPatch, agent: int) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "4567")
    found = [torchrun(monkeypatch, rank, 2, agent) for rank in range(2)]
    got: list[str] = []
    threads = [
        threading.Thread(target=lambda f=f: got.append(rendezvous.address_of_coordinator(f, 5)))
        for f in found
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got == ["localhost:4567"] * 2


def test_horovods_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "4567")
    with launch.horovods_server() as port:
        url = f"http://localhost:{port}"
        raises(
            lambda: rendezvous.address_of_coordinator(Launch("Horovod", 1, 2, meeting=url), 0.5),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR",
            url,
        )
        addresses = [
            rendezvous.address_of_coordinator(Launch("Horovod", i, 2, meeting=url), 2)
            for i in (0, 1)
        ]
    assert addresses == [f"{socket.gethostname()}:4567"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("head:1",), "give all three"),
        (("head:1", 2, 2), "numbered from 0 to 1"),
        (("head", 2, 0), '"head:1234"'),
    ],
)
def test_arguments_that_make_no_sense(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(Error, match=words):
        xd.distributed.initialize(*arguments)  # type: ignore[arg-type]


def test_a_process_that_is_alone_stays_alone() -> None:
    xd.init_device_mesh("xla", (8,))
    assert xd.distributed.initialize() == xd.distributed.initialize(num_processes=1) == 1
    assert (xd.distributed.process_index(), xd.distributed.process_count()) == (0, 1)
    with pytest.raises(Error, match="this process is alone already"):
        xd.distributed.initialize("localhost:1234", 2, 0)


def test_versions_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        values = {"process/0": '["head", 7, {"jax": "0.1"}]'}

        def put(self, key: str, value: str) -> None:
            self.values[key] = value

        def wait_for(self, key: str, seconds: float) -> str:
            return self.values[key]

    monkeypatch.setattr(distributed, "_facts", lambda: {"jax": "0.2"})
    with pytest.raises(Error, match=r"process 0 on head .* has jax 0.1, process 1 on .* has 0.2"):
        distributed._table(Launch("torchrun", 1, 2), Store())  # type: ignore[arg-type]


@pytest.mark.slow
def test_jax_was_started_before() -> None:
    program = "import jax, xla_dtensor as xd; jax.devices(); xd.init_device_mesh('xla', (2,))"
    for result in launch.run(["-c", program], 2, 60):
        assert result.code == 1 and "JAX has been started before" in result.output
