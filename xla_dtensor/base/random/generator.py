"""``torch.Generator(device="xla")``."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.base.random import rng
from xla_dtensor.base.torch_private import CppGenerator
from xla_dtensor.base.torch_private.attributes import cpp_address

# By where C++ has it: to operations it gives another Python object for the same generator.
_made: weakref.WeakValueDictionary[int, XLAGenerator] = weakref.WeakValueDictionary()


class XLAGenerator(CppGenerator):
    """A stream of random numbers of its own, for the ``generator=`` of operations on xla tensors.

    To C++, which has no generators of a device that is written in Python, it is one of the CPU's:
    it is seeded along, and what a sampler on the CPU draws from it is the CPU's numbers.

    Args:
        device: ``"xla"``, which is all that there is.
    """

    stream: rng.RandomStream

    def __new__(cls, device: Any = "xla") -> Any:
        made = super().__new__(cls)
        made.stream = rng.RandomStream()
        _made[cpp_address(made)] = made
        return made

    def __init__(self, device: Any = "xla") -> None:
        pass

    @property
    def device(self) -> torch.device:
        """``xla:0``: all devices of the process are one to torch."""
        return torch.device("xla:0")

    def manual_seed(self, seed: int) -> XLAGenerator:
        """Start the stream of ``seed``, any Python integer; returns the generator."""
        _refuse_in_step("seed")
        seed = int(seed) % 2**64
        CppGenerator.manual_seed(self, seed)
        self.stream.restart(seed)
        return self

    def seed(self) -> int:
        """Start the stream of a seed that nobody knows yet, and return it."""
        seed = rng.fresh_seed()
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        """The seed of the stream."""
        return self.stream.seed

    def get_state(self) -> torch.Tensor:
        """The place in the stream as a CPU uint8 tensor of 16 bytes."""
        return rng.tensor_of_state(rng.words_at(*self.stream.position()))

    def set_state(self, state: torch.Tensor) -> XLAGenerator:
        """Go to a place that `get_state` gave; returns the generator.

        Raises:
            ValueError: ``state`` isn't one.
        """
        _refuse_in_step("state")
        seed, counter = rng.position_in(state)
        CppGenerator.manual_seed(self, seed)
        self.stream.restart(seed, counter)
        return self

    def clone_state(self) -> XLAGenerator:
        """Another generator at the same place."""
        return XLAGenerator().set_state(self.get_state())

    def __reduce__(self) -> Any:
        return _rebuild, (self.get_state(),)

    def __copy__(self) -> XLAGenerator:
        return self.clone_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> XLAGenerator:
        return memo.setdefault(id(self), self.clone_state())


def _rebuild(state: torch.Tensor) -> XLAGenerator:
    return XLAGenerator().set_state(state)


def _refuse_in_step(what: str) -> None:
    executor.current().refuse(f"a generator's new {what}, which")


def stream_of(generator: Any, name: str) -> rng.RandomStream:
    """The stream that operation ``name`` draws from, by its ``generator=``.

    Raises:
        RuntimeError: it is another device's, as in torch.
    """
    made = _made.get(cpp_address(generator))
    if made is None:
        raise RuntimeError(
            f"{name}: Expected a 'xla' device type for generator but found "
            f"'{generator.device.type}'; make it with torch.Generator(device='xla')"
        )
    executor.current().refuse(
        "generator= (a compiled step draws from the device's own stream, which "
        "torch.manual_seed seeds), which"
    )
    return made.stream
