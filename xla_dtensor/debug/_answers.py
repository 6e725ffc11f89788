"""What a call's layout rule says: placements, and which arguments are redistributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.debug._records import Redistribution
from xla_dtensor.debug._transfers import placements_on, transfers_of
from xla_dtensor.forms.form import Form
from xla_dtensor.lowering.kinds import Kind, is_
from xla_dtensor.mesh.layout import layout_of
from xla_dtensor.plans.call import Call, fill
from xla_dtensor.plans.result_placements import representable
from xla_dtensor.rules import Call as RuleCall
from xla_dtensor.rules import Merged, Registration, TensorInfo, find_registration
from xla_dtensor.rules.call import bind
from xla_dtensor.rules.infer import ask


@dataclass(frozen=True)
class RuleAnswer:
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
    transfers = transfers_of(info, target.placements, mesh)
    if whole and all(each.kind == "cut" for each in transfers):
        return None
    return Redistribution(name, source, target, transfers)


def ask_rule(
    call: Call, forms: list[Any], mesh: Any, results: Sequence[Form | None]
) -> RuleAnswer | None:
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
            infos[i] = TensorInfo(form.shape, placements_on(form, mesh), form.dtype)
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
    return RuleAnswer(found, text, merged, tensors, is_(Kind.LIKE, call.info.name))


def rule_words(answer: RuleAnswer | None, mesh: Any, is_view: bool) -> tuple[str, str, str]:
    """Whose rule, what it says and where it is from."""
    if mesh is None:
        return "-", "", ""
    if answer is None or answer.merged is None:
        return ("view" if is_view else "compiler"), "", ""
    found = answer.found
    if is_view and found.kind == "family":
        return "view", "", found.where
    return found.kind, answer.text, found.where
