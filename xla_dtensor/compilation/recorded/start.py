"""What a trace starts from: the arguments that the step's Python is given, and what it can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from xla_dtensor.base import torch_private
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.asked_ids import AskedIds
from xla_dtensor.compilation.code.garbage import NewObjects
from xla_dtensor.compilation.code.installed import CodeRecorder
from xla_dtensor.compilation.code.names import describe
from xla_dtensor.compilation.objects.carried import each_once
from xla_dtensor.compilation.objects.flatten import MadeObjects
from xla_dtensor.compilation.objects.global_state import active_modes, saving_hooks
from xla_dtensor.compilation.objects.readers import ReadsMore
from xla_dtensor.compilation.recorded.taken_back import TakenBack
from xla_dtensor.compilation.trace.numbers_of_trace import NumberLeft
from xla_dtensor.compilation.watch.effects import PlacesBefore
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.errors import DataDependentError
from xla_dtensor.tensors.of_form import is_ours


class Start:
    """What is known before the step's Python runs; nobody needs it once the trace is over.

    Args:
        function: the step's Python.
        arguments: of the call.
        dynamic: the numbers among them that are inputs.
        carried: the names in messages of places that each call takes its values from.
        recorder: of the code that runs.
        fixed: whether the Python finds optimizers' hyperparameters as they are.
        unmet: functions that another trace has run, and that nothing leads to.
        known: what could be read by all code that another trace has run.
        knows_frame: whether the program runs where what it can reach lies.
        items: the items of tensors that are inputs, beside floats; None if there can't be any.

    Attributes:
        function, recorder, fixed: as given.
        names_of_carried: what was given as ``carried``.
        roots: where the walk starts, with names for messages.
        executed: the code of installed packages that has run so far.
        watch: what the Python can read.
        carried: the places whose values are taken like arguments.
        dynamic: the numbers that are inputs, those of such places, too.
        items: as given; None if the code asks for types, too.
        call: the caller's arguments, with what is carried.
        arguments: those that the Python is given: without what they were computed from.
        cut: the tensors among them that have a history for the caller.
        ids: the arguments whose ``id`` it asks for.
        leaves: the tensors that it is known to reach.
        frame: the devices of all those that can lie nowhere else; None if they are of several
            meshes, or of none.
        surroundings: the places that it may change.
        taken_back: what else is as before if the trace fails.

    Raises:
        ReadsMore: it reads more of the arguments than their key knows of.
        NumberLeft: it can't do with numbers that are inputs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        dynamic: frozenset[int],
        carried: frozenset[str],
        recorder: CodeRecorder,
        fixed: bool,
        unmet: Sequence[FunctionType],
        known: Watch | None = None,
        knows_frame: bool = True,
        items: frozenset[str] | None = frozenset(),
    ) -> None:
        if torch_private.parametrizations_are_cached():
            raise DataDependentError(
                "a compiled step inside of torch.nn.utils.parametrize.cached(): the cache would "
                "keep what exists only while the step is traced; enter it inside of the step"
            )
        self.function, self.recorder, self.fixed = function, recorder, fixed
        self.names_of_carried = carried
        caller = arguments.given or arguments
        arguments = caller.without_history()
        pairs = zip(arguments.tensors, caller.tensors, strict=True)
        self.cut = [mine for mine, theirs in pairs if mine is not theirs]
        self.roots: list[tuple[str, Any]] = [
            ("the step", function),
            *arguments.roots(),
            *active_modes(),
            *saving_hooks(),
            *((f"{describe(function)}, which the step runs", function) for function in unmet),
        ]
        self.executed = recorder.executed()
        self.watch = Watch(self.roots, carried, self.executed, True, known=known, fixed=fixed)
        names = self.watch.names
        try:
            caller.check_reads(names.reads)
        except ReadsMore as more:
            more.watch = self.watch
            raise
        self.carried = each_once(self.watch.reached.carried)
        call, now = caller.carrying(self.carried), arguments.carrying(self.carried)
        assert call is not None and now is not None  # the watch has looked at each
        self.call, self.arguments = call, now
        self.dynamic = dynamic | now.carried_numbers()
        if self.dynamic and names.asks_types:
            raise NumberLeft("the step asks for the type() of numbers")
        self.items = None if names.asks_types else items
        self.watch.remember_caches()
        self.surroundings = PlacesBefore(self.watch, now)
        self.ids = AskedIds(now, names.calls("id"))
        self.leaves = [*self.watch.leaves, *now.tensors]
        self.taken_back = TakenBack(self.watch, self.leaves)
        forms = {tensor._storage_.form for tensor in filter(is_ours, self.leaves)}
        frames = {form.frame for form in forms if form.frame and form.anywhere() is None}
        self.frame = frames.pop() if knows_frame and len(frames) == 1 else None

    def finds(self, tensor: torch.Tensor) -> bool:
        """Whether the step finds a tensor elsewhere than among its arguments."""
        return id(tensor) in self.watch.reached.tensors

    def made_objects(self, new: NewObjects) -> MadeObjects:
        """The objects that the Python makes in the block ``new``."""
        given = set(map(id, self.arguments.tensors))
        return MadeObjects(
            new,
            self.surroundings.holds,
            lambda t: not self.finds(t) and id(t) not in given,
            self.surroundings.memory(),
        )
