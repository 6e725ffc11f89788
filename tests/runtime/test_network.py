"""A dead network between hosts: processes say who is cut off and where all were, and end."""

from __future__ import annotations

import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import launch
from tests.runtime.network import CUTS, HostNetwork
from xla_dtensor.runtime.network import links

HEARTBEAT = 8
SOON = HEARTBEAT + 12  # two intervals until it is noticed, the end of all, and busy cores
PROGRAM = ["-m", "tests.runtime.programs.cut_off"]
# What the processes do, and the line at which it is done.
WHAT = {
    "compiled": "# compiled",
    "eager": "# (eager|product)",
    "loading": "# loading",
    "saving": "# saving",
    "alone": "# product",
}


@pytest.fixture
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostNetwork]:
    """Of as many hosts as the test is marked with."""
    try:
        found = HostNetwork(getattr(request, "param", 2), tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    with found:
        yield found


def begun(network: HostNetwork, count: int, what: str, folder: Path) -> launch.Processes:
    """Processes that are in the midst of it."""
    variables = {"XLA_DTENSOR_HEARTBEAT_TIMEOUT": str(HEARTBEAT)}
    processes = network.start([*PROGRAM, what, str(folder)], variables)
    end = time.monotonic() + 90
    while len(list(folder.glob("ready*"))) < count and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(2)
    return processes


def ended(processes: launch.Processes) -> list[str]:
    """What they have printed; all have ended by themselves, soon."""
    began = time.monotonic()
    results = processes.wait(processes.seconds() + SOON)
    for result in results:
        assert result.code == 1, result.output
    assert time.monotonic() - began < SOON
    return [result.output for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("what", WHAT)
def test_a_cut_cable(network: HostNetwork, tmp_path: Path, what: str, how: str) -> None:
    """Whatever they do, and whether or not the network cards notice."""
    processes = begun(network, 2, what, tmp_path)
    network.cut(1, how)
    for i, output in enumerate(ended(processes)):
        own, other = (rf"process {j} on host-{j} \(pid \d+\)" for j in (i, 1 - i))
        gone = ", which coordinates, hasn't answered" if i else " has given no sign of life"
        step = r" \(compiled step \d+\)" if what == "compiled" else ""
        lines = (  # a sign of life may be of some seconds ago
            r"  it was last seen at \S+cut_off.py:\d+: .*\n"
            rf"  this one is at \S+cut_off.py:\d+: .*{WHAT[what]}{step}\n"
        )
        assert re.search(rf"{own} ends, since {other}{gone} for 8 s.*\n{lines}", output), output


@pytest.mark.slow
@pytest.mark.parametrize("network", [3], indirect=True)
@pytest.mark.parametrize("lost", [0, 2])
def test_one_of_three_hosts_is_cut_off(network: HostNetwork, tmp_path: Path, lost: int) -> None:
    processes = begun(network, 3, "compiled", tmp_path)
    network.cut(lost, "silent")
    outputs = ended(processes)
    for i in {0, 1, 2} - {lost}:
        assert f"process {i} on host-{i}" in outputs[i]
        assert f"since process {lost} on host-{lost} " in outputs[i]


@pytest.mark.slow
@pytest.mark.parametrize("network", [3], indirect=True)
def test_two_hosts_reach_all_but_each_other(network: HostNetwork, tmp_path: Path) -> None:
    """Each gives signs of life, and no collective ends."""
    processes = begun(network, 3, "compiled", tmp_path)
    network.part(1, 2)
    for i, output in enumerate(ended(processes)):
        assert f"process {i} on host-{i}" in output
        told = r"since process (\d) on host-\d .* doesn't reach process (\d) on host-\d .* any more"
        found = re.search(told, output)
        assert found is not None and set(found.groups()) == {"1", "2"}, output
        assert "the network between them is dead\n  it was last seen at " in output


def test_who_keeps_a_connection_to_whom() -> None:
    """Of up to five processes all pairs; of many some between any two halves."""
    for count in range(1, 6):
        pairs = {frozenset((i, j)) for i in range(count) for j in links.peers(i, count)}
        assert pairs == {frozenset((i, j)) for i in range(1, count) for j in range(1, i)}
    assert [len(links.peers(i, 1000)) for i in (0, 1, 500, 999)] == [0, 10, 10, 9]


def test_the_machines_own_network_is_left_alone(network: HostNetwork) -> None:
    assert socket.gethostname() != "host-0"
    assert "port0" not in subprocess.run(["ip", "link"], capture_output=True, text=True).stdout


def test_nothing_is_watched_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns: no socket, no question to the store, which isn't there."""
    monkeypatch.setattr(links.processes._state, "coordinator", "localhost:1234")
    links.LivingLinks(10.0, threading.Event(), lambda other, why: None).run()


def test_who_never_says_where_it_is_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 of 4 keeps connections to 2 and 3. The one hasn't found an address of its own."""
    with socket.socket() as third:
        third.bind(("127.0.0.1", 0))
        third.listen()
        third.settimeout(5)
        said = {"reach/3": f"127.0.0.1 {third.getsockname()[1]}"}

        class Store:
            put = staticmethod(said.__setitem__)

            @staticmethod
            def wait_for(key: str, seconds: float) -> str | None:
                return said.get(key)

        for name, value in (("store", Store), ("index", lambda: 1), ("count", lambda: 4)):
            monkeypatch.setattr(links.processes, name, value)
        monkeypatch.setattr(links, "_own_address", lambda: "127.0.0.1")
        stopping = threading.Event()
        living = links.LivingLinks(10.0, stopping, lambda other, why: None)
        thread = threading.Thread(target=living.run)
        thread.start()
        try:
            third.accept()[0].close()
        finally:
            stopping.set()
            thread.join(5)
    assert not thread.is_alive()
