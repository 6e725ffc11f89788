"""One run of a program: the values its guards have computed, and the outputs of its launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.forms.form import Form


class Prepared:
    """What the checks of a call have computed, and its launch needs.

    Attributes:
        numbers: the values of the program's numbers.
        host: the results of the host's operations.
    """

    __slots__ = ("host", "numbers")

    def __init__(self, numbers: list[float], host: list[Any]) -> None:
        self.numbers, self.host = numbers, host


class Outputs:
    """A program's outputs, which a trace has numbered in the order in which it met them.

    Args:
        order: their numbers, in the order in which the program returns them.

    Attributes:
        forms: by number.
        position: which of the arrays that the program returns an output is.
    """

    __slots__ = ("forms", "order", "position")

    def __init__(self, forms: list[Form], order: Sequence[int]) -> None:
        self.forms, self.order = forms, order
        self.position = {output: i for i, output in enumerate(order)}


class Run:
    """One run of a program.

    Attributes:
        arguments, prepared: of the call.
        outputs: of the program.
        arrays: what the program has computed; None before it has.
        made: the tensors made of that, by the ``id`` of the recipe.
        objects: the objects made around them, by their numbers.
        error: what has failed first in writing back, or None.
    """

    __slots__ = ("arguments", "arrays", "error", "made", "objects", "outputs", "prepared")

    def __init__(self, arguments: Arguments, prepared: Prepared, outputs: Outputs) -> None:
        self.arguments, self.prepared, self.outputs = arguments, prepared, outputs
        self.arrays: Any = None
        self.made: dict[int, Any] = {}
        self.objects: dict[int, Any] = {}
        self.error: BaseException | None = None

    def array(self, output: int) -> Any:
        """The array of an output."""
        return self.arrays[self.outputs.position[output]]

    def succeeds(self, piece: Callable[..., Any], *args: Any) -> bool:
        """Do a piece of the writing back, ``piece(*args, run)``; if it fails, that is raised when
        the rest is done."""
        try:
            piece(*args, self)
        except BaseException as error:
            self.error = self.error or error
            return False
        return True

    def with_retry(self, pieces: Iterable[Callable[[Any, Run], Any]], owner: Any) -> None:
        """Do pieces that may be done twice, ``piece(owner, run)``, one that fails again (for want
        of memory, say), and the others all the same."""
        for piece in pieces:
            try:
                piece(owner, self)
            except BaseException as error:
                self.error = self.error or error
                self.succeeds(piece, owner)
