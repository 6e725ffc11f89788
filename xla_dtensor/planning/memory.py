"""The memory that a program needs on a device, compiled or refused by XLA."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments, outputs, aliased, temporaries: what goes in, comes out, is both, and is there in
            between; None where XLA has refused the program, and doesn't say.
        needed: arguments, outputs and temporaries, what is aliased counted once.
        available: what the device has; None if nobody knows.
        host: of the host's memory, for what rests there (``offload_state``, ``CPUOffloadPolicy``);
            in none of the others.
        largest: where XLA has refused the program, its largest allocations, in its words.
    """

    arguments: int | None
    outputs: int | None
    aliased: int | None
    temporaries: int | None
    needed: int
    available: int | None
    largest: tuple[str, ...] = ()
    host: int = 0

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough; None if nobody knows how much it has."""
        return None if self.available is None else self.needed <= self.available


def of_compiled(compiled: Any, available: float | None) -> Memory:
    """The memory of a ``jax.stages.Compiled``.

    Its own ``peak_memory_in_bytes`` counts a TPU's vector memory, too.
    """
    analysis = compiled.memory_analysis()
    arguments = analysis.argument_size_in_bytes
    outputs, aliased = analysis.output_size_in_bytes, analysis.alias_size_in_bytes
    temporaries = analysis.temp_size_in_bytes
    needed = arguments + outputs - aliased + temporaries
    limit = None if available is None else int(available)
    host = (
        analysis.host_argument_size_in_bytes
        + analysis.host_output_size_in_bytes
        - analysis.host_alias_size_in_bytes
        + analysis.host_temp_size_in_bytes
    )
    return Memory(arguments, outputs, aliased, temporaries, needed, limit, host=host)


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# "...the total memory required for HLO temporaries (24.00G) exceeds available HBM (15.75G)": of
# libtpu 0.0.52, where the first figure has the arguments in it, whatever it is called.
_EXCEEDS = re.compile(
    r"\((?P<used>[\d.]+)(?P<used_unit>[KMGT]?)\) exceeds available HBM "
    r"\((?P<limit>[\d.]+)(?P<limit_unit>[KMGT]?)\)"
)
# "Used 18.00G of 15.75G hbm. Exceeded hbm capacity by 2.25G.": of earlier ones, which also list the
# largest allocations.
_USED = re.compile(
    r"Used (?P<used>[\d.]+)(?P<used_unit>[KMGT]?) of (?P<limit>[\d.]+)(?P<limit_unit>[KMGT]?) hbm"
)
_ALLOCATION = re.compile(
    r"^\s*\d+\. Size: (?P<size>[\d.]+[KMGT]?)\n(?P<rest>(?:^(?!\s*\d+\. Size:|\s*=+).*\n?)*)",
    re.MULTILINE,
)


def is_refusal(error: BaseException) -> bool:
    """Whether XLA has refused a program for want of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def of_refusal(error: BaseException) -> Memory | None:
    """The memory of a program that XLA doesn't compile since it doesn't fit, from its message; None
    where that has no figures."""
    text = str(error)
    match = _EXCEEDS.search(text) or _USED.search(text)
    if match is None:
        return None
    used, limit = (
        int(float(match[name]) * _UNITS[match[f"{name}_unit"]]) for name in ("used", "limit")
    )
    largest = []
    for found in _ALLOCATION.finditer(text):
        shape = re.search(r"Shape: (\S+)", found["rest"])
        name = re.search(r'op_name="([^"]*)"', found["rest"])
        words = [found["size"], *(m[1] for m in (shape, name) if m is not None)]
        largest.append(" ".join(words))
    return Memory(None, None, None, None, used, limit, tuple(largest[:10]))
