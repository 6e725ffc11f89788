"""`Recorder`: makes an `Operation` of everything that it is told, and passes it on."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.utils._pytree import tree_leaves

from xla_dtensor.base import events, thread_state
from xla_dtensor.base.source_line import caller
from xla_dtensor.custom_ops.jax_function import name_of
from xla_dtensor.debug._records import (
    ITSELF,
    AnyLayout,
    Operation,
    Redistribution,
    Transfer,
    layout_text,
)
from xla_dtensor.dispatch.call import Call, fill
from xla_dtensor.dispatch.lower import NestedTrace
from xla_dtensor.dispatch.one_mesh import on_one_mesh
from xla_dtensor.dispatch.ops import OpInfo, info_of
from xla_dtensor.dispatch.plan import Plan, mutated_leaves
from xla_dtensor.dispatch.result_forms import READ_NO_VALUES
from xla_dtensor.dispatch.result_placements import representable
from xla_dtensor.dispatch.view_plan import ViewPlan
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.local_form import from_devices
from xla_dtensor.mesh import mesh_dim_axes
from xla_dtensor.mesh.layout import layout_of
from xla_dtensor.rules import Call as RuleCall
from xla_dtensor.rules import Merged, Registration, TensorInfo, find_registration
from xla_dtensor.rules.asking import ask
from xla_dtensor.rules.call import bind
from xla_dtensor.rules.cost import Collective, collectives
from xla_dtensor.tensors.base import TensorMethods

Sink = Callable[[Operation], None]

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
        self._thread = _ThreadState()

    def add(self, sink: Sink) -> None:
        """Tell ``sink`` from now on."""
        self._sinks.append(sink)
        events.observer = self

    def remove(self, sink: Sink) -> None:
        """Tell it no more."""
        self._sinks.remove(sink)
        if not self._sinks:
            events.observer = None

    # --- what it is told ---------------------------------------------------------------------

    def operation(self, call: Call, plan: Plan | ViewPlan) -> None:
        if _is_nested():
            return
        forms = on_one_mesh(call.forms)
        inputs = [(i, form) for i, form in enumerate(forms) if isinstance(form, Form)]
        written = [call.leaves[i]._form for i in mutated_leaves(call)]
        fresh = plan.forms if isinstance(plan, ViewPlan) else plan.result_forms
        outputs = [*(form for form in fresh if form is not None), *written]
        mesh = next((f.mesh for _, f in inputs if f.mesh is not None), None)
        is_view = isinstance(plan, ViewPlan)
        answer = None
        if mesh is not None and not (is_view and plan.identity):  # type: ignore[union-attr]
            answer = _ask(call, forms, mesh, fresh or written)
        redistributions: list[Redistribution] = []
        if answer is not None and not any(form.meta for _, form in inputs):
            redistributions = answer.redistributions(forms, mesh, fresh, written)
        kind, rule, where = _rule(answer, mesh, is_view)
        self._tell(
            op=_name_of(call),
            inputs=[_word(call.leaves[i], form) for i, form in inputs],
            outputs=[_layout(form) for form in outputs],
            shapes=([form.shape for _, form in inputs], [form.shape for form in outputs]),
            rule=(kind, rule, where),
            redistributions=redistributions,
            exchanges=answer is not None and answer.merged is not None and answer.merged.exchanges,
            mesh=mesh,
        )

    def special(
        self, run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = [x for x in tree_leaves((args, kwargs)) if isinstance(x, TensorMethods)]
        forms = [x._form for x in before]
        told = self._thread.told
        result = run(func, args, kwargs)
        name = info_of(func).name
        unchanged = result is NotImplemented or any(result is x for x in before)
        if unchanged or told != self._thread.told or name in _UNTOLD or _is_nested():
            return result
        after = [x._form for x in tree_leaves(result) if isinstance(x, TensorMethods)]
        # The value is looked at, so what is pending is reduced.
        reductions = [
            _redistribution("input", form, _reduced(form)) for form in forms if _is_partial(form)
        ]
        self._tell(
            op=name,
            inputs=[_layout(form) for form in forms],
            outputs=[_layout(form) for form in after],
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
            self._move("redistribute", source, target, [_redistribution(ITSELF, source, target)])

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
                transfers.append(Transfer("broadcast", _dim_name(target.mesh, dim), own))
            elif isinstance(placement, Partial):
                transfers.append(_transfer(Collective("all-reduce", dim, n, own), target.mesh))
        moved = Redistribution("local_tensor", _layout(source), _layout(target), tuple(transfers))
        self._move("from_local", source, target, [moved] if transfers else [])

    def relayout(self, convert: Any, source: Form, target: Form) -> None:
        if convert is from_devices:
            return  # told as from_local
        moves = getattr(convert, "moves", None)
        name = getattr(convert, "name", None) or _words(convert)
        if moves is not None:
            transfers = tuple(_transfer(each, None) for each in moves(source, target))
            moved = Redistribution(ITSELF, _layout(source), _layout(target), transfers)
            self._move(name, source, target, [moved] if transfers else [])
        elif source.placements is not None:
            self._move(name, source, target, [_redistribution(ITSELF, source, target)])

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
            redistributions.append(_redistribution(name, source, target))
        rule = op.rule if op.rule is not None else f"{type(op).__name__}.infer_layout"
        self._tell(
            op=f"DFunction {op.op_name}",
            inputs=[_layout(form) for form in forms],
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
            inputs=[_layout(source)],
            outputs=[_layout(target)],
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
            traced=thread_state.current() is not None,
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


def _is_nested() -> bool:
    return isinstance(thread_state.current(), NestedTrace)


# --- layouts and what moves between them -----------------------------------------------------


def _word(leaf: Any, form: Form) -> AnyLayout:
    return _layout(form) if isinstance(leaf, TensorMethods) else "cpu"


def _layout(form: Form) -> AnyLayout:
    """The layout of a tensor of this form."""
    if form.mesh is None or form.placements is None:
        return f"per-device({', '.join(form.varying)})" if form.varying else "per-device"
    layout = layout_of(form.mesh, form.placements, len(form.shape))
    if not form.varying:
        return layout
    return f"{layout_text(layout)} per-device({', '.join(form.varying)})"


def _dim_name(mesh: Any, dim: int) -> str:
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"mesh dim {dim}"


def _transfer(collective: Collective, mesh: Any) -> Transfer:
    along = collective.along
    name = _dim_name(mesh, along) if isinstance(along, int) else ", ".join(along)
    return Transfer(collective.kind, name, round(collective.nbytes))


def _is_partial(form: Form) -> bool:
    return any(isinstance(p, Partial) for p in form.placements or ())


def _reduced(form: Form) -> Form:
    assert form.mesh is not None and form.placements is not None
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in form.placements)
    return form.with_placements(form.mesh, placements)


def _redistribution(argument: str, source: Form, target: Form) -> Redistribution:
    """From one form of a tensor to another; of a per-device one that is replicated."""
    assert source.frame is not None and target.frame is not None
    words = _layout(source), _layout(target)
    if source.frame.device_ids != target.frame.device_ids:
        count = math.prod(target.frame.sizes[name] for names in target.dim_axes for name in names)
        nbytes = math.prod(target.shape) * target.dtype.itemsize // count
        return Redistribution(argument, *words, (Transfer("copy", "", nbytes),))
    source, target = on_one_mesh([source, target])
    mesh = source.mesh if source.mesh is not None else target.mesh
    before, after = (_placements_on(form, mesh) for form in (source, target))
    info = TensorInfo(source.shape, before, target.dtype)
    return Redistribution(argument, *words, _transfers(info, after, mesh))


def _placements_on(form: Form, mesh: Any) -> tuple[Placement, ...]:
    return (Replicate(),) * mesh.ndim if form.placements is None else form.placements


def _transfers(info: TensorInfo, target: Sequence[Placement], mesh: Any) -> tuple[Transfer, ...]:
    # A label of a part that nobody has: whatever the other parts are, this one is all of it.
    wanted = tuple(
        Replicate() if isinstance(new, Partial) and new != old else new
        for old, new in zip(info.placements, target, strict=True)
    )
    return tuple(_transfer(each, mesh) for each in collectives(info, wanted, tuple(mesh.shape)))


# --- rules -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    """What the rule of a call says of it.

    Attributes:
        found: the rule.
        text: what it says, in words.
        merged: the layouts; None if it leaves the call to the compiler.
        tensors: the tensor arguments that ``merged.inputs`` is of: name, index of the leaf, what
            the rule saw of it.
    """

    found: Registration
    text: str
    merged: Merged | None
    tensors: list[tuple[str, int, TensorInfo]]
    unread: bool

    def redistributions(
        self, forms: list[Any], mesh: Any, fresh: Sequence[Any], written: list[Form]
    ) -> list[Redistribution]:
        """The inputs that are used in another layout than they have; and what is written to an
        argument that is in another one."""
        if self.merged is None or self.unread:
            return []
        moved = []
        # The library's own rules may say nothing of the last tensors.
        for (name, index, info), wanted in zip(self.tensors, self.merged.inputs, strict=False):
            found = _between(name, info, wanted, mesh, forms[index].placements is None)
            if found is not None:
                moved.append(found)
        if not fresh:
            for form, placements in zip(written, self.merged.outputs, strict=False):
                if form.placements is None or form.mesh != mesh:
                    continue
                info = TensorInfo(form.shape, tuple(placements), form.dtype)
                found = _between("result", info, form.placements, mesh, False)
                if found is not None:
                    moved.append(found)
        return moved


def _between(
    name: str, info: TensorInfo, wanted: Sequence[Placement], mesh: Any, whole: bool
) -> Redistribution | None:
    """From the layout that ``info`` has to the one wanted, if that is another; ``whole``: it is of
    a tensor that isn't sharded."""
    source = layout_of(mesh, representable(tuple(info.placements), mesh, info.ndim), info.ndim)
    target = layout_of(mesh, representable(tuple(wanted), mesh, info.ndim), info.ndim)
    if source == target:
        return None
    transfers = _transfers(info, target.placements, mesh)
    if whole and all(each.kind == "cut" for each in transfers):
        return None
    return Redistribution(name, source, target, transfers)


def _ask(call: Call, forms: list[Any], mesh: Any, results: Sequence[Form | None]) -> _Answer | None:
    """What the rule says of a call, as dispatch asks it; None without a rule.

    Of an operation that only writes to its arguments, dispatch has nothing to ask. The rule then
    says what the result would be.
    """
    func = call.info.func
    found = find_registration(func)
    if found is None:
        return None
    infos: list[Any] = list(call.leaves)
    for i, form in enumerate(forms):
        if isinstance(form, Form):
            infos[i] = TensorInfo(form.shape, _placements_on(form, mesh), form.dtype)
    args = tuple(fill(list(call.args), infos))
    kwargs = {name: fill(value, infos) for name, value in call.kwargs.items()}
    bound = bind(func, args, kwargs)
    shapes = tuple(None if form is None else form.shape for form in results)
    rule_call = RuleCall(func, bound, shapes, tuple(mesh.shape), mesh, (args, kwargs))
    said = found.rule(rule_call)
    text = said if isinstance(said, str) else found.text
    merged = ask(lambda _: said, rule_call)
    index_of = {id(info): i for i, info in enumerate(infos)}
    names = {
        id(item): name if item is value else f"{name}[{i}]"
        for name, value in bound.items()
        for i, item in enumerate(value if isinstance(value, list | tuple) else [value])
    }
    tensors = [(names[id(t)], index_of[id(t)], t) for t in rule_call.tensors]
    return _Answer(found, text, merged, tensors, call.info.name in READ_NO_VALUES)


def _rule(answer: _Answer | None, mesh: Any, is_view: bool) -> tuple[str, str, str]:
    """Whose rule, what it says and where it is from."""
    if mesh is None:
        return "-", "", ""
    if answer is None or answer.merged is None:
        return ("view" if is_view else "compiler"), "", ""
    found = answer.found
    if is_view and found.kind == "family":
        return "view", "", found.where
    return found.kind, answer.text, found.where


def _name_of(call: Call) -> str:
    info: OpInfo = call.info
    if info.name != "xla_dtensor::jax_call.default":
        return info.name
    return f"{info.name.removesuffix('.default')} {name_of(cast(int, call.args[1]))}"


_WORDS = {"gather": "fully_shard: gather", "Reduce": "fully_shard: reduce"}


def _words(convert: Any) -> str:
    name = getattr(convert, "__name__", type(convert).__name__)
    return _WORDS.get(name, name)
