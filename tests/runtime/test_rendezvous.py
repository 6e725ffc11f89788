"""The processes meet, or say by name why they can't. Nothing here starts JAX."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import xla_dtensor as xd
from tests import launch
from xla_dtensor.runtime import distributed
from xla_dtensor.runtime.launchers import Launch, find
from xla_dtensor.runtime.network import rendezvous

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


def test_a_kernel_without_ipv6(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    class Socket(socket.socket):
        def __init__(self, family: int = socket.AF_INET, *args: object) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "socket", Socket)
    given = Launch("initialize()", 0, 2, "localhost:0")
    rendezvous.check_free(f"localhost:{launch.free_port()}", given)
    raises(lambda: rendezvous.check_free(f"localhost:{listening}", given), f"port {listening}")


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


def met(launches: list[Launch], patience: float = 5) -> list[str]:
    """What each of these finds, all at the same time; or its error."""
    got = [""] * len(launches)

    def meet(i: int) -> None:
        try:
            got[i] = rendezvous.address_of_coordinator(launches[i], patience)
        except Error as error:
            got[i] = str(error)

    threads = [threading.Thread(target=meet, args=(i,)) for i in range(len(launches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience + 5)
    return got


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_asked_for_twice(monkeypatch: pytest.MonkeyPatch, agent: int, rank: int) -> None:
    found = torchrun(monkeypatch, rank, 3, agent)
    others = [torchrun(monkeypatch, 0, 3, agent)] if rank else []
    got = met([*others, found, found], 2)
    assert any(f"RANK={rank} is asked for twice" in text for text in got), got
    assert any(f"(pid {os.getpid()}, since" in text for text in got), got


def test_they_meet_in_the_store(monkeypatch: pytest.MonkeyPatch, agent: int) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "4567")
    found = [torchrun(monkeypatch, rank, 2, agent) for rank in range(2)]
    assert met(found) == ["localhost:4567"] * 2


def test_they_meet_again_where_others_have_met(monkeypatch: pytest.MonkeyPatch, agent: int) -> None:
    """torchrun starts all again without counting it, where a host has come or gone."""
    for count, port in ((3, "4567"), (2, "4568"), (3, "4569"), (3, "4570")):
        monkeypatch.setenv("JAX_COORDINATOR_PORT", port)
        found = [torchrun(monkeypatch, rank, count, agent) for rank in range(count)]
        assert met(found) == [f"localhost:{port}"] * count


def test_who_waited_and_died_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch, agent: int) -> None:
    found = [torchrun(monkeypatch, rank, 3, agent) for rank in range(3)]
    for some in ([found[0]], found[:2], found[1:], found[::2]):
        assert all("has waited" in text for text in met(some, 0.4))
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "4571")
    assert met(found) == ["localhost:4571"] * 3


def test_who_comes_before_the_next_coordinator_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, agent: int
) -> None:
    found = [torchrun(monkeypatch, rank, 2, agent) for rank in range(2)]
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "4567")
    assert met(found) == ["localhost:4567"] * 2
    early: list[str] = []
    thread = threading.Thread(target=lambda: early.extend(met([found[1]])))
    thread.start()
    time.sleep(0.5)
    assert not early  # the address that it finds there is of a coordinator that is gone
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "4568")
    assert met([found[0]]) == ["localhost:4568"]
    thread.join(10)
    assert early == ["localhost:4568"]


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
