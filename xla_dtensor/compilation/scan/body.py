"""Traces the body of `scan_layers`: sets the outer trace's state aside, and restores it."""

from __future__ import annotations

from typing import Any

from xla_dtensor.base.numbers.wide_scalars import WideScalars
from xla_dtensor.compilation.trace.assertions import TraceAssertions
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.storage import Storage, next_version


class LoopBody:
    """In the block, which JAX traces by itself, tensors have the values of one round. What the
    step's trace remembers by its arrays is put aside: those of the body exist in it alone.

    Args:
        trace: of the step.
        storages: whose values differ from round to round.
        slices: their values in this one.
        words: the generator's state in this one.
        start: how far the generator is when the round begins, as the first one counts.

    Attributes:
        draws: the random operations of the block.
    """

    def __init__(
        self, trace: StepTrace, storages: list[Storage], slices: list[Any], words: Any, start: int
    ) -> None:
        self._trace, self._storages, self._slices = trace, storages, slices
        self._words, self._start = words, start
        self.draws = 0

    def __enter__(self) -> LoopBody:
        trace = self._trace
        self._kept = {name: getattr(trace, name) for name in _ASIDE}
        trace.scalars, trace._items, trace._marked, trace._in_devices = {}, {}, {}, {}
        trace._wide = WideScalars()
        trace.must_hold = TraceAssertions(checks_indices=False)
        trace.rng_words, trace._latest = self._words, None
        self._counter = trace.random.counter
        trace.random.counter = self._start
        # With versions: what was gathered from an earlier value must not be used for this one.
        self._before = [(s, s.value, s.form, s.version) for s in self._storages]
        for storage, value in zip(self._storages, self._slices, strict=True):
            storage.put_back(value, storage.form)
        self._loop_begins, trace.loop_begins = trace.loop_begins, next_version()
        self._owned = dict(trace._owned)
        self._seen = {id(c): c.storage.value for c in trace.captured if c.storage is not None}
        return self

    def __exit__(self, kind: Any, *exc_info: object) -> None:
        trace = self._trace
        self.draws = trace.random.counter - self._start
        trace.random.counter = self._counter
        trace.loop_begins = self._loop_begins
        asserted = trace.must_hold.own
        for name, value in self._kept.items():
            setattr(trace, name, value)
        written = [
            storage
            for storage, value in zip(self._storages, self._slices, strict=True)
            if storage.value is not value
        ]
        own = set(map(id, self._storages))
        for captured in trace.captured:
            storage = captured.storage
            if storage is None or id(storage) in own:
                continue
            was = self._seen.get(id(captured), captured.array)
            if storage.value is not was:
                written.append(storage)
                storage.put_back(was, captured.form)
        for storage, value, form, version in self._before:
            storage.put_back(value, form)
            storage.version = version
        if kind is not None:
            trace._owned = self._owned  # the error's frames keep tensors of the body alive
            return
        if written:
            raise UnsupportedOpError(
                f"scan_layers: a layer writes to a tensor of shape {list(written[0].form.shape)} "
                "from outside (a buffer, as BatchNorm does), which a loop over layers can't; run "
                "them one by one"
            )
        if asserted:
            raise UnsupportedOpError(
                "scan_layers: a layer asserts something of values (torch._assert_async), which a "
                "loop over layers can't; run them one by one"
            )


_ASIDE = (
    "scalars",
    "_items",
    "_marked",
    "_wide",
    "_in_devices",
    "must_hold",
    "rng_words",
    "_latest",
)
