"""What Python has computed from a trace's numbers, to be computed again from those of each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_NO_INPUTS: Any = object()


class FunctionOfInputs:
    """``function`` of some numbers, as a function of the values of the trace's inputs.

    A loop makes chains of them (``t = t + dt``). Each is computed once for a list of inputs, though
    many may need it, and with no more of Python's stack for a long chain than for a short one.

    Args:
        function: of Python's numbers; pure.
        reads: gives each operand from the inputs' values; None: it is a constant.
        constants: these; of others anything.

    Example::

        t = FunctionOfInputs(operator.add, [operator.itemgetter(0), None], [None, 2.0])
        assert t([3.0]) == 5.0
    """

    def __init__(
        self,
        function: Callable[..., Any],
        reads: Sequence[Callable[[list[Any]], Any] | None],
        constants: Sequence[Any],
    ) -> None:
        self._function, self._operands = function, list(zip(reads, constants, strict=True))
        self._before = [read for read in reads if isinstance(read, FunctionOfInputs)]
        self._last = _NO_INPUTS, None

    def __call__(self, inputs: list[Any]) -> Any:
        waiting = [self]
        while True:
            one = waiting[-1]
            last = one._last
            if last[0] is not inputs:
                missing = [each for each in one._before if each._last[0] is not inputs]
                if missing:
                    waiting += missing
                    continue
                values = (v if read is None else read(inputs) for read, v in one._operands)
                last = one._last = inputs, one._function(*values)
            waiting.pop()
            if not waiting:
                return last[1]  # not `_last`: another thread may have other inputs
