"""Where XLA gathers a whole tensor on its way from one sharding to another.

It says so on standard error as it compiles, and nowhere else: so a second process compiles again,
and its messages are read.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_dtensor.base.source_line import is_users
from xla_dtensor.errors import UnsupportedOpError

_PROGRAM = Path(__file__).with_name("_compile_aside.py")
_TIMEOUT = 600  # seconds
_WARNING = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding (?P<source>\{.*?\})"
    r" to (?P<target>\{.*?\}) efficiently for HLO operation %\S+ = "
    r"(?P<dtype>\w+)\[(?P<shape>[\d,]*)\]\S* (?P<operation>[\w-]+)\((?P<rest>.*)"
)
_DTYPE_BITS = re.compile(r"\d+$")


@dataclass(frozen=True)
class Rematerialization:
    """A tensor that XLA makes whole on every device, to cut it anew.

    Attributes:
        operation: the name of XLA's operation whose result it is, or ``"parameter"``: an input of
            the program.
        shape: of what a device has of it before.
        bytes: of that.
        source, target: the shardings, as XLA writes them.
        at: the user's line that the operation comes from (``"train.py:12"``); None of an input, and
            where XLA hasn't kept it.

    Example::

        import xla_dtensor as xd

        ways = "{devices=[1,8]<=[8]}", "{devices=[4,2]<=[2,4]T(1,0)}"
        found = xd.debug.Rematerialization("copy", (5, 1), 20, *ways, "train.py:12")
        assert found.at == "train.py:12" and found.bytes == 20
    """

    operation: str
    shape: tuple[int, ...]
    bytes: int
    source: str
    target: str
    at: str | None


def rematerializations(step: Any, *args: Any, **kwargs: Any) -> list[Rematerialization]:
    """Where XLA's partitioner finds no better way from one sharding to another than to make a
    tensor whole on all devices ("involuntary full rematerialization"). It costs memory and time
    where the tensor is large; a ``redistribute`` on the way, or another placement, avoids it.

    The step's program is compiled once more in a process of its own, for simulated CPU devices;
    here nothing is compiled, run or changed.

    Args:
        step: a compiled step.
        args, kwargs: as of a call.

    Returns:
        one for each, in the order in which XLA comes to them.

    Raises:
        TypeError: ``step`` is no compiled step.
        UnsupportedOpError: the program compiles for other devices alone.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4))
        x = xd.distribute_tensor(torch.ones(8, 8), mesh, [xd.Shard(0), xd.Shard(1)])
        assert xd.debug.rematerializations(xd.compile(lambda x: x.sum()), x) == []
    """
    if not hasattr(step, "lower"):
        raise TypeError(f"rematerializations: {step!r} is no compiled step; xd.compile it first")
    lowered = step.lower(*args, **kwargs)
    module = lowered.compiler_ir("stablehlo")
    count = module.operation.attributes["mhlo.num_partitions"].value
    text = module.operation.get_asm(enable_debug_info=True)
    return _read(*_compiled(text, count))


def _compiled(text: str, count: int) -> tuple[str, str]:
    """XLA's program for ``text``, and what XLA has said."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(count),
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # XLA says nothing of what it doesn't compile
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), str(count)],
        input=text,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise UnsupportedOpError(
            "rematerializations: the program doesn't compile for simulated CPU devices, where XLA "
            f"is listened to: {last[:500]}"
        )
    return done.stdout, done.stderr


def _read(program: str, said: str) -> list[Rematerialization]:
    frames = _Frames(program)
    found = []
    for match in _WARNING.finditer(said):
        shape = tuple(int(n) for n in match["shape"].split(",") if n)
        bits = _DTYPE_BITS.search(match["dtype"])
        size = int(bits.group()) if bits else 8  # pred
        frame = re.search(r"stack_frame_id=(\d+)", match["rest"])
        found.append(
            Rematerialization(
                match["operation"],
                shape,
                math.prod(shape) * size // 8,
                match["source"],
                match["target"],
                frames.users_line(int(frame.group(1))) if frame else None,
            )
        )
    return found


class _Frames:
    """The stack frames in the head of XLA's program."""

    def __init__(self, program: str) -> None:
        self.files = {
            int(number): name
            for number, name in re.findall(r'^(\d+) "(.*)"$', _part(program, "FileNames"), re.M)
        }
        self.locations = {
            int(number): (int(file), int(line))
            for number, file, line in re.findall(
                r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+) ", _part(program, "FileLocations"), re.M
            )
        }
        self.frames = {
            int(number): (int(location), int(parent))
            for number, location, parent in re.findall(
                r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}",
                _part(program, "StackFrames"),
                re.M,
            )
        }

        # The first frame has none above it: XLA prints that as 0, or the numbers plus one.
        self.offset = self.frames.get(1, (0, 0))[1]

    def users_line(self, number: int) -> str | None:
        """The innermost line of a frame, or of those above it, that is the user's."""
        while number in self.frames:
            location, parent = self.frames[number]
            file, line = self.locations.get(location, (0, 0))
            name = self.files.get(file)
            if name is not None and is_users(name):
                return f"{name}:{line}"
            number = parent - self.offset
        return None


def _part(program: str, name: str) -> str:
    """A table of the head, which ends with an empty line."""
    _, _, rest = program.partition(f"\n{name}\n")
    return rest.partition("\n\n")[0]
