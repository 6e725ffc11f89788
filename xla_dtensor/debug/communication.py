"""Counts the collectives, and the redistributions, of the code that runs."""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.debug._recorder import Guard, recorder
from xla_dtensor.debug._records import AnyLayout, Operation

# Plans have no room for weak references, and are few that no rule describes.
_of_plans: Cache[Any, Counter[str]] = Cache("collectives of plans", 256)
_of_programs: weakref.WeakKeyDictionary[Any, dict[str, Counter[str]]] = weakref.WeakKeyDictionary()

_COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_MOVES = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "permute"}


class Communication:
    """Between `start` and `stop`, tells of each collective that this thread runs.

    Of redistributions and of operations with a rule those that follow from the layouts, one per
    mesh dim, as torch runs them; of compiled steps, and of operations whose layouts the compiler
    chooses, those in XLA's program (one in a loop counts once).

    Args:
        tell: is called with a kind ("all-gather", "reduce-scatter", "all-reduce", "all-to-all",
            "broadcast" or "permute") and how many.
    """

    def __init__(self, tell: Callable[[str, int], None]) -> None:
        self._tell = tell
        self._thread = threading.get_ident()

    def start(self) -> None:
        """Begin to tell, of this thread."""
        self._thread = threading.get_ident()
        recorder.add(self._operation, self._launched)

    def stop(self) -> None:
        """Tell no more."""
        recorder.remove(self._operation, self._launched)

    def _operation(self, op: Operation) -> None:
        if op.traced or op.exchanges or op.kind == "compiler" or not self._is_here():
            return
        for redistribution in op.redistributions:
            for transfer in redistribution.transfers:
                # An all-reduce of one value and of zeros is what a broadcast is made of.
                kind = "broadcast" if op.op == "broadcast" else transfer.kind
                if kind in _MOVES:
                    self._tell(kind, 1)

    def _launched(self, program: Any, part: str, text: Callable[[], str]) -> None:
        if not self._is_here():
            return
        if part == "eager":
            found = _of_plans.get_or_make(program, lambda: collectives(text()))
        else:
            parts = _of_programs.setdefault(program, {})
            if part not in parts:
                parts[part] = collectives(text())
            found = parts[part]
        for kind, count in found.items():
            self._tell(kind.removeprefix("collective-"), count)

    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread


class Redistributions:
    """Between `start` and `stop`, tells of redistributions in this thread, outside of traces.

    Args:
        tell: is called with the argument (its number among the redistributed ones; of what is
            nothing but a redistribution its name) and the layouts before and after as texts.
    """

    def __init__(self, tell: Callable[[int | str, str, str], None]) -> None:
        self._tell = tell
        self._thread = threading.get_ident()

    def start(self) -> None:
        """Begin to tell, of this thread."""
        self._thread = threading.get_ident()
        recorder.add(self._operation)

    def stop(self) -> None:
        """Tell no more."""
        recorder.remove(self._operation)

    def _operation(self, op: Operation) -> None:
        if op.traced or threading.get_ident() != self._thread:
            return
        for i, each in enumerate(op.redistributions):
            where = op.op if op.is_move else i
            self._tell(where, _placements_text(each.source), _placements_text(each.target))


def _placements_text(layout: AnyLayout) -> str:
    """As torch's ``DebugMode`` writes placements: ``RS(0)P(sum)``."""
    if isinstance(layout, str):
        return layout
    texts = []
    for placement in layout.placements:
        if isinstance(placement, Replicate):
            texts.append("R")
        elif isinstance(placement, Partial):
            texts.append(f"P({placement.reduce_op})")
        else:
            texts.append(f"S({placement.dim})" if type(placement) is Shard else str(placement))
    return "".join(texts)


class Guarded:
    """Between `start` and `stop`, asks before an operation of this thread redistributes arguments.

    Args:
        ask: is called with the operation's name, its `Redistribution`s and the mesh; may raise.
    """

    def __init__(self, ask: Guard) -> None:
        self._ask = ask
        self._thread = threading.get_ident()

    def start(self) -> None:
        """Begin to ask, in this thread."""
        self._thread = threading.get_ident()
        recorder.add(guard=self._before)

    def stop(self) -> None:
        """Ask no more."""
        recorder.remove(guard=self._before)

    def _before(self, name: str, redistributions: Any, mesh: Any) -> None:
        if threading.get_ident() == self._thread:
            self._ask(name, redistributions, mesh)


def collectives(hlo_text: str) -> Counter[str]:
    """The collectives in an optimized program's text, by kind; one in a loop counts once."""
    return Counter(match[1] for match in _COLLECTIVE.finditer(hlo_text))
