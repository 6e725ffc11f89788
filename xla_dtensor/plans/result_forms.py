"""The forms of a call's results, and of what it writes to."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import host_memory
from xla_dtensor.errors import MeshMismatchError, UnsupportedOpError
from xla_dtensor.forms.form import Form, device_form, sharded_form
from xla_dtensor.forms.per_device import union
from xla_dtensor.forms.views import CrossingStep
from xla_dtensor.lowering.kinds import Kind, is_
from xla_dtensor.lowering.views.strided import overlaps
from xla_dtensor.mesh import Frame, frame_of, mesh_dim_axes
from xla_dtensor.plans.call import Call
from xla_dtensor.plans.meta import Meta
from xla_dtensor.plans.ops import OpInfo
from xla_dtensor.plans.result_placements import Answer, output_placements


class ResultDevices(NamedTuple):
    """Where a call's results are.

    Attributes:
        mesh: None of per-device tensors.
        frame: its devices; None for the default device.
        axes: along which the results vary.
        valueless: whether they have no value, being on the meta device.
        memory: that they rest in, as `Form.memory`.
    """

    mesh: DeviceMesh | None
    frame: Frame | None
    axes: tuple[str, ...]
    valueless: bool
    memory: str | None


def place_of(call: Call) -> ResultDevices:
    """Where the results of a call are.

    Raises:
        MeshMismatchError: the tensors live on different meshes.
        UnsupportedOpError: a per-device tensor meets a sharded one that it varies within.
    """
    mesh, frame = _where(call)
    memory = None if frame is None else _memory(call)
    return ResultDevices(mesh, frame, varying_axes(call, frame), has_no_value(call), memory)


def output_forms(
    place: ResultDevices, metas: list[Meta | None], answer: Answer | None
) -> list[Form | None]:
    """The form of each result: its meta data from torch, its layout from the rules.

    Args:
        answer: the rule's, if there is a mesh.
    """
    if answer is None:
        return [
            None
            if m is None
            else device_form(
                place.frame,
                m.shape,
                m.stride,
                m.offset,
                m.dtype,
                place.axes,
                place.valueless,
                place.memory,
            )
            for m in metas
        ]
    if not any(m is not None for m in metas):
        return [None for _ in metas]
    return [
        None
        if m is None
        else sharded_form(
            answer.mesh,
            p,
            m.shape,
            m.stride,
            m.offset,
            m.dtype,
            varying=place.axes,
            meta=place.valueless,
            memory=place.memory,
        )
        for m, p in zip(metas, output_placements(answer), strict=True)
    ]


def _memory(call: Call) -> str | None:
    """The memory that results rest in: a tensor like one in the host's memory is there, too, as
    ``torch.zeros_like`` of a tensor on the CPU. Everything that is computed is on the devices."""
    if not call.info.makes_like:
        return None
    like = next((form for form in call.forms if isinstance(form, Form)), None)
    if like is None:
        return None
    return like.memory or (host_memory.of_states() if like.shape else None)


def refuse_meta_write(info: OpInfo, written: list[Form]) -> None:
    for form in written:
        if not form.meta:
            raise NotImplementedError(
                f"{info.name}: Cannot copy out of meta tensor; no data! (into a tensor of shape "
                f"{list(form.shape)})"
            )


def written_form(tensor: Any, axes: tuple[str, ...], frame: Any, info: OpInfo) -> Form:
    """The form of a tensor's storage after the write of a value that varies along ``axes``.

    Raises:
        UnsupportedOpError: what the devices hold of a sharded tensor would differ along an axis
            along which the sharded tensor doesn't.
    """
    form, own, steps = tensor._storage_.form, tensor._form, tensor._steps
    if not (steps and isinstance(steps[0], CrossingStep)):
        form = form.reduced()  # but a `CrossingStep` writes a Partial's parts
    if not set(axes) - set(own.varying):
        return form
    if any(isinstance(step, CrossingStep) for step in tensor._steps):
        raise UnsupportedOpError(
            f"{info.name}: the written tensor {list(own.shape)} is what devices hold of a sharded "
            f"tensor, the same along {sorted(set(axes) - set(own.varying))}, and would differ "
            "there; write to a copy (x.to_local().clone())"
        )
    return form.placed(frame).with_varying(union(frame, [form.varying, axes]))


def has_no_value(call: Call) -> bool:
    """Whether a tensor of the call is on the meta device, and so all results."""
    return any(isinstance(form, Form) and form.meta for form in call.forms)


def varying_axes(call: Call, frame: Any) -> tuple[str, ...]:
    """The axes along which the call's results vary: those of all tensors whose values it reads."""
    if call.info.makes_like:
        return ()
    forms = [form for form in call.forms if isinstance(form, Form)]
    for form in forms:
        if form.varying:
            form.check_axes(call.info.name, frame)
    axes = union(frame, [form.varying for form in forms])
    if not axes:
        return ()
    for form in forms:
        if form.mesh is None:
            continue
        own = {name for names in mesh_dim_axes(form.mesh) for name in names}
        if own & set(axes):
            raise UnsupportedOpError(
                f"{call.info.name}: a sharded tensor on {form.mesh!r} with placements "
                f"{list(form.placements or ())} can't be combined with a per-device tensor that "
                f"varies along {sorted(own & set(axes))}: is it one value per device, or a part of "
                "one value? Say which with DTensor.from_local(per_device_tensor, mesh, "
                "placements), or compute per device with sharded_tensor.to_local()"
            )
    return axes


def _where(call: Call) -> tuple[Any, Any]:
    """The mesh and frame of the results.

    Raises:
        MeshMismatchError: the tensors live on different meshes.
    """
    mesh = frame = None
    for form in call.forms:
        if not isinstance(form, Form) or form.frame is None:
            continue
        if frame is None:
            frame = form.frame
        elif frame.device_ids != form.frame.device_ids:
            raise MeshMismatchError(
                f"{call.info.name}: one tensor is on {frame.root!r} (devices "
                f"{list(frame.device_ids)}), another on {form.frame.root!r} (devices "
                f"{list(form.frame.device_ids)}); bring them together with "
                "x.redistribute(device_mesh, placements)"
            )
        elif frame is not form.frame and mesh is None:
            if frame.root == form.frame.root:
                frame = frame_of(frame.root)  # the refined frame has the axes of all meshes
            elif form.varying:
                frame = form.frame
        if form.mesh is None:
            continue
        if mesh is None:
            mesh = form.mesh
        elif mesh != form.mesh:
            raise MeshMismatchError(
                f"{call.info.name}: one tensor is on {mesh!r}, another on {form.mesh!r}; bring them"
                " together with x.redistribute(device_mesh, placements)"
            )
        frame = frame_of(mesh)
    return mesh, frame


def refuse_overlap(call: Call, written: list[Form]) -> None:
    """Raise for a write to elements that share memory, unless all of them get one value: to an
    expanded tensor, as torch's kernels do but for ``index_put_``, and to windows that overlap.
    Those torch lets one write to, with a result that hangs on the order in which its kernel goes
    through the elements.
    """
    name = call.info.name
    puts = name == "aten::index_put_.default"
    if is_(Kind.FILL, name) or (puts and _writes_number(call)):
        return
    for form in written:
        if 0 in form.shape:
            continue
        if not puts and any(
            n > 1 and not step for n, step in zip(form.shape, form.stride, strict=True)
        ):
            raise RuntimeError(
                f"{name}: unsupported operation: more than one element of the written-to tensor "
                f"{list(form.shape)} refers to a single memory location; clone() the tensor before "
                "writing to it"
            )
        if not overlaps(form.shape, form.stride):
            continue
        if name == "aten::copy_.default" and _writes_number(call):  # windows[:] = 0
            continue
        raise UnsupportedOpError(
            f"{name}: elements of the written-to tensor of shape {list(form.shape)} and strides "
            f"{list(form.stride)} share memory (it is expanded, or windows that overlap), and "
            "torch leaves open what becomes of several values that go to one place; write to its "
            "base, to one window at a time, or to a clone()"
        )


def _writes_number(call: Call) -> bool:
    """Whether what ``copy_`` or ``index_put_`` writes is one number."""
    bound = dict(zip(call.info.argument_names, call.args, strict=False)) | call.kwargs
    form = call.forms[bound["src" if "src" in bound else "values"].index]
    if not isinstance(form, Form) or bound.get("accumulate", False):
        return False
    return all(n == 1 or not step for n, step in zip(form.shape, form.stride, strict=True))


def grown_forms(
    call: Call, metas: list[Any], bases: list[Any], place: ResultDevices
) -> list[Form | None]:
    """Per tensor written the form that it takes on because the result has another shape, or None.

    torch resizes ``out=`` tensors; they then are laid out as the rule says of the result.
    """
    grown: list[Form | None] = [None] * len(bases)
    if not call.info.is_out or len(call.info.mutated) != len(bases):
        return grown
    written: list[Any] = [None] * len(bases)
    for meta, alias in zip(metas, call.info.returns_mutated, strict=True):
        if alias is not None:
            written[alias] = meta
    changed = [
        m if m is not None and m.shape != tuple(b.shape) else None
        for m, b in zip(written, bases, strict=True)
    ]
    if not any(changed):
        return grown
    for meta in changed:
        if meta is not None:
            meta.offset = 0
    answer = None if place.mesh is None else Answer(call, place.mesh, changed)
    return output_forms(place, changed, answer)
