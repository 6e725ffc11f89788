"""Context managers: the operations of a block are recorded, and launched together."""

from __future__ import annotations

from xla_dtensor.base import executor, interrupts
from xla_dtensor.execution.batch import Batch


class writing_down:
    """Write this thread's operations on xla tensors down in ``batch``, for a block. Inside another
    batch, or in a trace, the block is part of that."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._block = executor.running(batch)
        self._joined = False

    @interrupts.atomic
    def __enter__(self) -> None:
        outer = executor.enclosing()
        self._joined = outer is not None and (outer.batch is not None or outer.trace is not None)
        if not self._joined:
            self._block.__enter__()

    @interrupts.atomic
    def __exit__(self, *exc_info: object) -> None:
        if not self._joined:
            self._block.__exit__(*exc_info)


class batched(writing_down):
    """Run this thread's operations on xla tensors, for a block, in as few launches as their values
    allow. If the block raises, what it has done until then is done."""

    def __init__(self) -> None:
        super().__init__(Batch())

    @interrupts.atomic
    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if not self._joined:
            self._batch.run()
