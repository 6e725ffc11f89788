"""``with xd.scan_layers():``: finds calls of equal layers one after another, and makes them a loop.

The first of a list's equal layers is called: the loop over all of them is traced, and its first
result returned. The others' calls are answered with the loop's further results, as long as each
gets what the one before gave, and else what the first one got.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private import current_backward, pytree, top_saved_tensors_hooks
from xla_dtensor.base.torch_private.attributes import submodules_of
from xla_dtensor.compilation.code.patched import patched
from xla_dtensor.compilation.code.reflection import HOOKS
from xla_dtensor.compilation.scan.autocasts import Autocast
from xla_dtensor.compilation.scan.equal_layers import changed, equal_to_first, same_value
from xla_dtensor.compilation.scan.loop import Layers
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.tensors.of_form import is_ours

logger = logging.getLogger("xla_dtensor")

AT_LEAST = 4  # equal layers that are worth a loop


@contextlib.contextmanager
def scan_equal_layers(
    *, at_least: int = AT_LEAST, recompute: bool = False, offload: bool = False
) -> Iterator[None]:
    """The block of `scan_layers`.

    Raises:
        ValueError: ``at_least`` is less than 2.
        UnsupportedOpError: (at the layer after) the layers draw random numbers, and so does the
            model between two of them.
    """
    if at_least < 2:
        raise ValueError(f"scan_layers(at_least={at_least}): a loop has two layers or more")
    trace = executor.trace()
    if not isinstance(trace, StepTrace):
        yield
        return
    chains = _Chains(trace, at_least, recompute, offload)
    original = nn.Module.__call__

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if executor.trace() is not trace or chains.tracing:
            return original(module, *args, **kwargs)
        answer = chains.answer(module, args, kwargs)
        if answer is not None:
            return answer
        chains.meet(module)
        return original(module, *args, **kwargs)

    with patched(nn.Module, "__call__", call):
        yield
        chains.end()


class _Chains:
    """The lists of layers that a block has met.

    Attributes:
        tracing: whether a loop is being traced.
    """

    def __init__(self, trace: StepTrace, at_least: int, recompute: bool, offload: bool) -> None:
        self._trace, self._at_least = trace, at_least
        self._options = {"recompute": recompute, "offload": offload}
        self._places: dict[int, tuple[nn.Module, list[nn.Module], int]] = {}
        self._met: set[int] = set()
        self._begun: dict[int, _Chain] = {}  # by the id of the list of layers
        self.tracing = False

    def meet(self, module: nn.Module) -> None:
        """Note the lists of a module that is called."""
        for part in (module, *submodules_of(module).values()):
            is_list = isinstance(part, nn.Sequential) or (
                part is not module and isinstance(part, nn.ModuleList)
            )
            if not is_list or id(part) in self._met:
                continue
            self._met.add(id(part))
            layers = list(submodules_of(part).values())
            if len(set(map(id, layers))) < len(layers) or None in layers:
                continue  # the same layer twice
            for i, layer in enumerate(layers):
                self._places.setdefault(id(layer), (part, layers, i))

    def answer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a loop has computed for this call; None if the layer is to run."""
        if id(module) not in self._places or current_backward() != -1:
            return None  # a layer of no list, or computed again in backward
        part, layers, index = self._places[id(module)]
        chain = self._begun.get(id(part))
        if chain is not None and chain.is_open:
            return chain.next(module, args, kwargs)
        if not args or not is_ours(args[0]):
            return None
        if top_saved_tensors_hooks(True) is not None:
            return None  # under torch.utils.checkpoint
        run, differs = equal_to_first(layers[index:])
        name = f"{type(part).__name__} of {type(module).__name__}s"
        if run < self._at_least:
            if differs is not None and len(layers) >= self._at_least:
                logger.info("scan_layers: %s: they differ in %s", name, differs[0])
            return None
        if any(map(_has_hooks, layers[index : index + run])):
            logger.info("scan_layers: %s: they have hooks", name)
            return None
        self.tracing = True
        try:
            chain = _Chain(self._trace, name, layers[index : index + run], args, kwargs)
            chain.begin(self._options)
        except UnsupportedOpError as error:
            logger.info("scan_layers: %s: %s", name, error)
            # Don't try again at each of the layers that follow.
            for layer in layers[index : index + run]:
                del self._places[id(layer)]
            return None
        finally:
            self.tracing = False
        self._begun[id(part)] = chain
        return chain.next(module, args, kwargs)

    def end(self) -> None:
        """See that no loop has layers that weren't called."""
        for chain in self._begun.values():
            if chain.is_open:
                chain.part("the others weren't called")


class _Chain:
    """Layers of which the first has been called."""

    def __init__(
        self,
        trace: StepTrace,
        name: str,
        layers: list[nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._trace, self._name, self._layers = trace, name, layers
        self._x, self._rest = args[0], pytree.tree_flatten((args[1:], kwargs))
        self._given = args[1:], kwargs
        self._done = 0
        self._modes = _modes()
        self.is_open = True

    def begin(self, options: dict[str, bool]) -> None:
        """Trace the loop.

        Raises:
            UnsupportedOpError: it can't be one.
        """
        args, kwargs = self._given
        self._scan = Layers(self._trace, self._layers, args, kwargs, **options, each=True)
        self._results = self._scan.run(self._x)
        self._versions = [_versions(tensors) for tensors in self._scan.tensors]
        self._expected = self._x, self._x._version

    def next(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``module``, if it is the next one and is called as the loop has; None, and
        the chain is parted, if not."""
        why = self._other_than_expected(module, args, kwargs)
        if why is not None:
            self.part(why)
            return None
        result = self._results[self._done]
        self._expected = result, result._version
        self._done += 1
        self.is_open = self._done < len(self._layers)
        return result

    def _other_than_expected(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        before, version = self._expected
        if module is not self._layers[self._done]:
            return f"layer {self._done} isn't the next one that is called"
        where = f"layer {self._done} is called"
        if not args or args[0] is not before:
            return f"{where} with something else than what the one before has given"
        if before._version != version:
            return f"{where} with what has been written to since the one before has given it"
        flat, tree = pytree.tree_flatten((args[1:], kwargs))
        same = tree == self._rest[1] and all(map(same_value, flat, self._rest[0]))
        if not same or (self._done and self._scan.others_changed()):
            return f"{where} with other arguments than the first one"
        if _modes() != self._modes:
            return f"{where} in another mode (grad, autocast) than the first one"
        what = changed(self._scan.description, module)
        if (
            what is not None
            or _versions(self._scan.tensors[self._done]) != self._versions[self._done]
        ):
            return f"layer {self._done} has changed since the first one was called"
        self._see_random_numbers()
        return None

    def _see_random_numbers(self) -> None:
        scan = self._scan
        if scan.draws and self._trace.random.counter != scan.random + scan.draws * scan.count:
            raise UnsupportedOpError(
                f"scan_layers: {self._name} draw random numbers (dropout), and something "
                "between two of them does, too: the loop has taken the numbers of all of them by "
                "then. Call what is between them outside of the block, or leave it out"
            )

    def part(self, why: str) -> None:
        """Leave the loop; what follows is computed by itself."""
        self.is_open = False
        self._see_random_numbers()
        if self._scan.draws:
            self._trace.random.counter = self._scan.random + self._scan.draws * self._done
        logger.warning(
            "xla_dtensor: scan_layers: %s: %s; of the loop's %d results %d are used, all are "
            "computed. Call such a model outside of the block",
            self._name,
            why,
            len(self._layers),
            self._done,
        )


def _has_hooks(layer: nn.Module) -> bool:
    """Whether the layer has hooks but `fully_shard`'s: they might keep what exists in the loop."""
    hooks = [h for m in layer.modules() for name in HOOKS for h in getattr(m, name).values()]
    return any(getattr(hook, "__module__", "").partition(".")[0] != "xla_dtensor" for hook in hooks)


def _versions(tensors: list[Any]) -> list[int]:
    return [tensor._storage_.version for tensor in tensors]


def _modes() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), Autocast.here()
