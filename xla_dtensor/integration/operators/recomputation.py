"""Notifies traces when ``torch.utils.checkpoint`` (non-reentrant) recomputes a block."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from xla_dtensor.base import executor, recomputation, thread_state
from xla_dtensor.base.torch_private import checkpoint_hook, recomputation_hook


class _Recomputing:
    """A step that becomes one program must know, or XLA would merge the recomputation with the
    first computation."""

    def __enter__(self) -> None:
        self._step = executor.current()
        self._step.begin_recomputation()

    def __exit__(self, *exc_info: object) -> None:
        self._step.end_recomputation()


def install() -> None:
    """Extend the two hooks of ``torch.utils.checkpoint`` that a block runs in."""

    first, again = checkpoint_hook, recomputation_hook
    init_first, init_again = first.__init__, again.__init__
    enter, leave = again.__enter__, again.__exit__

    def first_run(self: Any, frame: Any, *args: Any, **kwargs: Any) -> None:
        watchers = recomputation.watchers
        frame._xla_remembered = [(restore, remember()) for remember, restore in watchers]
        init_first(self, frame, *args, **kwargs)

    def second_run(self: Any, frame: Any, *args: Any, **kwargs: Any) -> None:
        self._xla_remembered = getattr(frame(), "_xla_remembered", ())
        init_again(self, frame, *args, **kwargs)

    def begin(self: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(_Recomputing())
            # It may be a DFunction's backward that looks at the first saved tensor.
            stack.enter_context(thread_state.inside_function(None))
            for restore, remembered in self._xla_remembered:
                stack.enter_context(restore(remembered))
            result = enter(self)
            self._xla_contexts = stack.pop_all()
        return result

    def end(self: Any, *exc_info: Any) -> Any:
        with self._xla_contexts:
            return leave(self, *exc_info)

    first.__init__, again.__init__ = first_run, second_run
    again.__enter__, again.__exit__ = begin, end
