"""Changes that a branch or a body makes to Python's objects outside of it: refused.

Its Python runs a few times while the step is traced, and not once for each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from xla_dtensor.base.source_line import user_line
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.objects.places import MISSING
from xla_dtensor.compilation.watch.effects import Effect, PlacesBefore
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.errors import UnsupportedOpError


class Surroundings:
    """What functions can reach, as it is before they run.

    Args:
        functions: the branches, or the bodies.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        roots = [("the function", function) for function in functions]
        watch = Watch(roots, executed=frozenset(), expecting=True)
        self._before = PlacesBefore(watch, Arguments((), {}))

    def check(self) -> None:
        """Called when they have run.

        Raises:
            UnsupportedOpError: they have changed something.
        """
        for effect in self._before.effects():
            if not _fills_a_table(effect):
                raise UnsupportedOpError(
                    f"a branch or the body of a loop changes {effect.text()}: in a compiled step "
                    "its Python doesn't run once for each run; return what changes, as a "
                    f"tensor{user_line()}"
                )


def _fills_a_table(effect: Effect) -> bool:
    """Whether a dict has got entries that are no tensors, which would be the same again."""
    added = isinstance(effect.place.owner, dict) and effect.grows()
    return (
        added
        and all(x is MISSING for x in effect.before.values())
        and not any(isinstance(x, torch.Tensor) for x in effect.after.values())
    )
