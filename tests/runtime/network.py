"""Hosts that are joined by a network whose cables can be cut: network namespaces of this machine.

Each host has a name, an address and an ``/etc/hosts`` of its own; its cable goes to a port of a
switch, which is a namespace, too. Nothing of the machine's own network is touched, and when the
processes that hold the namespaces end, all of it is gone.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import launch

_HOLDS = "read line"  # until its standard input is closed, be it because this process was killed
CUTS = {
    # The switch's port goes dark, and the host's card sees it.
    "unplugged": "ip link set port{i} down",
    # Nobody sees anything: what is sent gets nowhere, and nothing says so.
    "silent": "ip link set port{i} nomaster",
}
APART = "ip link set port{i} type bridge_slave isolated on"


class HostNetwork:
    """Hosts ``host-0``, ``host-1``, ... and the switch between them.

    Args:
        count: of the hosts.
        folder: for their files.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._count = count
        addresses = "".join(f"{self.address(i)} host-{i}\n" for i in range(count))
        names = folder / "hosts"
        names.write_text(f"127.0.0.1 localhost\n{addresses}")
        self._spaces: list[subprocess.Popen[str]] = []
        try:
            self._add("ip link add bridge0 type bridge; ip link set bridge0 up")
            for i in range(count):
                self._add(f"hostname host-{i}; mount --bind {names} /etc/hosts; ip link set lo up")
                self._in(
                    0,
                    f"ip link add port{i} type veth peer name eth0 netns {self._spaces[-1].pid}; "
                    f"ip link set port{i} master bridge0; ip link set port{i} up",
                )
                self._in(i + 1, f"ip addr add {self.address(i)}/24 dev eth0; ip link set eth0 up")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def cut(self, host: int, how: str) -> None:
        """Cut a host's cable in one of the ways of `CUTS`."""
        self._in(0, CUTS[how].format(i=host))

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        self._in(0, f"ip link set port{host} master bridge0; ip link set port{host} up")

    def part(self, *hosts: int) -> None:
        """Let hosts reach all others, and not each other."""
        self._in(0, "; ".join(APART.format(i=host) for host in hosts))

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> launch.Processes:
        """A process on each host; they find each other as torchrun's do."""
        port = launch.free_port()
        environments = [
            launch.torchrun_variables(i, self._count, port)
            | {"MASTER_ADDR": "host-0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            | dict(variables)
            for i in range(self._count)
        ]
        within = [self.on(i) for i in range(self._count)]
        return launch.Processes(command, environments, within)

    def on(self, host: int) -> list[str]:
        """What runs a command on a host."""
        return self._enter(host + 1)

    def close(self) -> None:
        for space in self._spaces:
            space.communicate()

    def __enter__(self) -> HostNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, commands: str) -> None:
        space = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-ec", f"{commands}; echo; {_HOLDS}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._spaces.append(space)
        assert space.stdout is not None and space.stderr is not None
        if not space.stdout.readline():
            raise OSError(f"no namespaces of networks here: {space.stderr.read().strip()}")

    def _enter(self, space: int) -> list[str]:
        return ["nsenter", "--net", "--uts", "--mount", f"--target={self._spaces[space].pid}"]

    def _in(self, space: int, commands: str) -> None:
        command = [*self._enter(space), "sh", "-ec", commands]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{commands}: {done.stderr.strip()}")
