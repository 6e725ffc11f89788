"""`Recorder`: an observer that makes an `Operation` of each event, and passes it on."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch.distributed.tensor.placement_types import Partial, Replicate

from xla_dtensor.base import events, executor
from xla_dtensor.base.source_line import caller
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.custom_ops.jax_function import name_of
from xla_dtensor.debug._answers import RuleAnswer, ask_rule, rule_words
from xla_dtensor.debug._programs import program_text
from xla_dtensor.debug._records import (
    ITSELF,
    AnyLayout,
    Operation,
    Redistribution,
    Transfer,
)
from xla_dtensor.debug._transfers import (
    form_layout,
    is_partial,
    one_transfer,
    redistribution,
    reduced,
    word,
)
from xla_dtensor.execution.nested import Nested
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.local_form import from_devices
from xla_dtensor.mesh import mesh_dim_axes
from xla_dtensor.mesh.dim_names import dim_name
from xla_dtensor.plans.call import Call
from xla_dtensor.plans.one_mesh import on_one_mesh
from xla_dtensor.plans.ops import OpInfo, info_of
from xla_dtensor.plans.plan import Plan, mutated_leaves
from xla_dtensor.plans.view_plan import ViewPlan
from xla_dtensor.rules.cost import Collective
from xla_dtensor.tensors.of_form import is_ours

Sink = Callable[[Operation], None]
Launches = Callable[[Any, str, Callable[[], str]], None]
"""Is told of a program (a compiled step's, or the plan of an operation whose rule doesn't say what
is communicated) which part was launched, and how to get its text."""
Guard = Callable[[str, Sequence[Redistribution], Any], None]
"""Is asked before an operation that redistributes arguments: its name, those, and the mesh."""

HOST = "on the host"

_UNTOLD = frozenset(
    {"aten::is_pinned.default", "aten::_has_compatible_shallow_copy_type.default"}
)  # questions, not operations


class _ThreadState(threading.local):
    depth = 0
    told = 0
    """The operations told so far."""
    function: Any = None
    """The op of the `DFunction` call that this thread is in."""
    inputs: list[Form] | None = None
    """While that call is being prepared: those of its inputs."""
    moved: list[tuple[Form, Form]] = []
    """Their redistributions so far."""
    waiting: list[Operation] = []
    """Other operations of the preparation: they follow the call that they belong to."""


class Recorder:
    """The `Observer`. Operations inside torch's decompositions, which become parts of one
    executable, are parts of their operation and not told."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self._launches: list[Launches] = []
        self._guards: list[Guard] = []
        self._thread = _ThreadState()

    def add(
        self,
        sink: Sink | None = None,
        launches: Launches | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Tell ``sink`` from now on, and the others."""
        for listeners, new in self._listeners(sink, launches, guard):
            listeners.append(new)
        events.observe(self)

    def remove(
        self,
        sink: Sink | None = None,
        launches: Launches | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Tell them no more."""
        for listeners, old in self._listeners(sink, launches, guard):
            listeners.remove(old)
        if not (self._sinks or self._launches or self._guards):
            events.observe(None)

    def _listeners(self, *given: Any) -> Iterator[tuple[list[Any], Any]]:
        lists: tuple[list[Any], ...] = (self._sinks, self._launches, self._guards)
        return (pair for pair in zip(lists, given, strict=True) if pair[1] is not None)

    # --- what it is told ---------------------------------------------------------------------

    def planned(self, call: Call, plan: Plan | ViewPlan) -> None:
        if not self._guards or _is_nested():
            return
        _, mesh, _, redistributions = _implied(call, plan)
        if redistributions:
            for guard in tuple(self._guards):
                guard(_name_of(call), redistributions, mesh)

    def launched(self, program: Any, part: str, text: Callable[[], str]) -> None:
        for each in tuple(self._launches):
            each(program, part, text)

    def operation(self, call: Call, plan: Plan | ViewPlan) -> None:
        if _is_nested():
            return
        forms, mesh, answer, redistributions = _implied(call, plan)
        inputs = [(i, form) for i, form in enumerate(forms) if isinstance(form, Form)]
        written = [call.leaves[i]._form for i in mutated_leaves(call)]
        fresh = plan.forms if isinstance(plan, ViewPlan) else plan.result_forms
        outputs = [*(form for form in fresh if form is not None), *written]
        is_view = isinstance(plan, ViewPlan)
        kind, rule, where = rule_words(answer, mesh, is_view)
        exchanges = answer is not None and answer.merged is not None and answer.merged.exchanges
        self._tell(
            op=_name_of(call),
            inputs=[word(call.leaves[i], form) for i, form in inputs],
            outputs=[form_layout(form) for form in outputs],
            shapes=([form.shape for _, form in inputs], [form.shape for form in outputs]),
            rule=(kind, rule, where),
            redistributions=redistributions,
            exchanges=exchanges,
            mesh=mesh,
        )
        runs = isinstance(plan, Plan) and plan.run is not None and executor.trace() is None
        if self._launches and runs and (kind == "compiler" or exchanges):
            self.launched(plan, "eager", functools.partial(program_text, cast(Plan, plan), call))

    def special(
        self, run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = [x for x in pytree.tree_leaves((args, kwargs)) if is_ours(x)]
        forms = [x._form for x in before]
        told = self._thread.told
        result = run(func, args, kwargs)
        name = info_of(func).name
        unchanged = result is NotImplemented or any(result is x for x in before)
        if unchanged or told != self._thread.told or name in _UNTOLD or _is_nested():
            return result
        after = [x._form for x in pytree.tree_leaves(result) if is_ours(x)]
        # The value is looked at, so what is pending is reduced.
        reductions = [
            redistribution("input", form, reduced(form)) for form in forms if is_partial(form)
        ]
        self._tell(
            op=name,
            inputs=[form_layout(form) for form in forms],
            outputs=[form_layout(form) for form in after],
            shapes=([form.shape for form in forms], [form.shape for form in after]),
            rule=("-", HOST, ""),
            redistributions=reductions,
            mesh=next((form.mesh for form in forms if form.mesh is not None), None),
        )
        return result

    def redistribute(self, source: Form, target: Form) -> None:
        if self._thread.inputs is not None:
            self._thread.moved.append((source, target))
        else:
            self._move("redistribute", source, target, [redistribution(ITSELF, source, target)])

    def to_local(self, source: Form, target: Form) -> None:
        self._move("to_local", source, target, [])

    def from_local(self, source: Form, target: Form) -> None:
        assert target.mesh is not None and target.placements is not None
        own = math.prod(source.shape) * source.dtype.itemsize
        # run_check: coordinate 0's value for all; a Partial without parts of its own: reduced.
        transfers = []
        for dim, names in enumerate(mesh_dim_axes(target.mesh)):
            placement, n = target.placements[dim], target.mesh.size(dim)
            if not set(names) & set(source.varying) or dim in target.unreduced:
                continue
            if isinstance(placement, Replicate):
                transfers.append(Transfer("broadcast", dim_name(target.mesh, dim), own))
            elif isinstance(placement, Partial):
                transfers.append(one_transfer(Collective("all-reduce", dim, n, own), target.mesh))
        moved = Redistribution(
            "local_tensor", form_layout(source), form_layout(target), tuple(transfers)
        )
        self._move("from_local", source, target, [moved] if transfers else [])

    def relayout(self, convert: Any, source: Form, target: Form) -> None:
        if convert is from_devices:
            return  # told as from_local
        moves = getattr(convert, "moves", None)
        name = getattr(convert, "name", None) or _words(convert)
        if moves is not None:
            transfers = tuple(one_transfer(each, None) for each in moves(source, target))
            moved = Redistribution(ITSELF, form_layout(source), form_layout(target), transfers)
            self._move(name, source, target, [moved] if transfers else [])
        elif source.placements is not None:
            self._move(name, source, target, [redistribution(ITSELF, source, target)])

    @contextlib.contextmanager
    def function(self, op: Any, inputs: Sequence[Any]) -> Iterator[None]:
        thread = self._thread
        outer = thread.depth, thread.function, thread.inputs, thread.moved, thread.waiting
        thread.function, thread.inputs = op, [x._form for x in inputs]
        thread.moved, thread.waiting = [], []
        thread.depth += 1
        try:
            yield
        finally:
            unsaid = thread.waiting
            thread.depth, thread.function, thread.inputs, thread.moved, thread.waiting = outer
            self._pass_on(unsaid)  # the call was refused

    def inferred(self, inferred: Any) -> None:
        thread, op = self._thread, self._thread.function
        forms = thread.inputs
        assert forms is not None
        moved, waiting = thread.moved, thread.waiting
        thread.inputs, thread.moved, thread.waiting = None, [], []
        redistributions = []
        rest = dict(enumerate(forms))
        for source, target in moved:
            at = next((i for i, form in rest.items() if form is source), None)
            rest.pop(at, None)  # type: ignore[arg-type]
            name = "input" if at is None else f"input {at}"
            redistributions.append(redistribution(name, source, target))
        rule = op.rule if op.rule is not None else f"{type(op).__name__}.infer_layout"
        self._tell(
            op=f"DFunction {op.op_name}",
            inputs=[form_layout(form) for form in forms],
            outputs=list(inferred.outputs),
            shapes=([form.shape for form in forms], list(inferred.shapes or ())),
            rule=("user", rule, op.registered_at),
            redistributions=redistributions,
            mesh=forms[0].mesh,
            depth=thread.depth - 1,
        )
        self._pass_on(waiting)

    def compiled(self, name: str) -> None:
        self._tell(
            op=f"compiled step {name}",
            inputs=[],
            outputs=[],
            shapes=([], []),
            rule=("-", COMPILED_BEFORE, ""),
            redistributions=[],
            mesh=None,
        )

    # --- what it tells -----------------------------------------------------------------------

    def _move(
        self, op: str, source: Form, target: Form, redistributions: list[Redistribution]
    ) -> None:
        mesh = target.mesh if source.mesh is None else source.mesh
        self._tell(
            op=op,
            inputs=[form_layout(source)],
            outputs=[form_layout(target)],
            shapes=([source.shape], [target.shape]),
            rule=("-", "", ""),
            redistributions=redistributions if not source.meta else [],
            mesh=mesh,
        )

    def _tell(
        self,
        *,
        op: str,
        inputs: list[AnyLayout],
        outputs: list[AnyLayout],
        shapes: tuple[Sequence[Any], Sequence[Any]],
        rule: tuple[str, str, str],
        redistributions: list[Redistribution],
        mesh: Any,
        exchanges: bool = False,
        depth: int | None = None,
    ) -> None:
        if _is_nested():
            return
        self._thread.told += 1
        kind, text, where = rule
        record = Operation(
            op=op,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            input_shapes=tuple(map(tuple, shapes[0])),
            output_shapes=tuple(map(tuple, shapes[1])),
            kind=kind,
            rule=text,
            where=where,
            redistributions=tuple(redistributions),
            exchanges=exchanges,
            at=caller(),
            traced=executor.trace() is not None,
            depth=self._thread.depth if depth is None else depth,
            mesh=mesh,
        )
        if self._thread.inputs is not None:
            self._thread.waiting.append(record)
        else:
            self._pass_on([record])

    def _pass_on(self, records: list[Operation]) -> None:
        for record in records:
            for sink in tuple(self._sinks):
                sink(record)


recorder = Recorder()

COMPILED_BEFORE = "runs a program that was compiled before"


def _implied(
    call: Call, plan: Plan | ViewPlan
) -> tuple[list[Any], Any, RuleAnswer | None, list[Redistribution]]:
    """The forms of a call's arguments, their mesh, what its rule says, and what is redistributed
    for that."""
    forms = on_one_mesh(call.forms)
    inputs = [form for form in forms if isinstance(form, Form)]
    written = [call.leaves[i]._form for i in mutated_leaves(call)]
    fresh = plan.forms if isinstance(plan, ViewPlan) else plan.result_forms
    mesh = next((form.mesh for form in inputs if form.mesh is not None), None)
    answer = None
    if mesh is not None and not (isinstance(plan, ViewPlan) and plan.identity):
        answer = ask_rule(call, forms, mesh, fresh or written)
    if answer is None or any(form.meta for form in inputs):
        return forms, mesh, answer, []
    return forms, mesh, answer, answer.redistributions(forms, mesh, fresh, written)


def _is_nested() -> bool:
    return isinstance(executor.trace(), Nested)


def _name_of(call: Call) -> str:
    info: OpInfo = call.info
    if info.name != "xla_dtensor::jax_call.default":
        return info.name
    return f"{info.name.removesuffix('.default')} {name_of(cast(int, call.args[1]))}"


_WORDS = {"gather": "fully_shard: gather", "Reduce": "fully_shard: reduce"}


def _words(convert: Any) -> str:
    name = getattr(convert, "__name__", type(convert).__name__)
    return _WORDS.get(name, name)
