"""How one kind of call is executed: made on the first call with a key, reused for every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor import _context
from xla_dtensor.device_tensor import XLATensor
from xla_dtensor.dispatch._call import Call, Slot, fill
from xla_dtensor.dispatch._layout import Pins, output_placements, pins
from xla_dtensor.dispatch._lower import flatten_results, lowered_function
from xla_dtensor.dispatch._ops import DROPPED, OpInfo, info_of
from xla_dtensor.dtypes import to_torch_dtype
from xla_dtensor.errors import MeshMismatchError, UnsupportedOpError
from xla_dtensor.form import Form, contiguous_stride, device_form, sharded_form
from xla_dtensor.mesh import frame_of, mesh_dim_axes
from xla_dtensor.per_device import check_axes, coordinate, over_devices, union
from xla_dtensor.sharded_tensor import XLAShardedTensor
from xla_dtensor.storage import ONE_VIEWER, LayoutStep, Storage, ViewStep, freeze, write_through


class Meta:
    """What torch's meta kernel says of one result."""

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.stride = tuple(tensor.stride())
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype


class ViewPlan:
    """A view call: no computation, a step to append and the form of each result.

    ``as_strided`` looks at the memory behind a tensor, not at the tensor: its base is no view (but
    for what devices hold of a sharded tensor, or the other way round), and its step follows the
    one that puts the base in the order of its memory.
    """

    __slots__ = ("forms", "identity", "of_memory", "returns_list", "steps")

    def __init__(self, call: Call) -> None:
        info = call.info
        base_form = call.forms[0]
        self.identity = info.is_identity
        self.returns_list = info.returns_lists[0]
        metas = _meta_results(call)
        self.forms = [form for form in output_forms(call, metas) if form is not None]
        self.steps: list[ViewStep] = []
        self.of_memory = False
        if self.identity:
            self.forms = [base_form]
            return
        assert info.view is not None
        args = tuple(freeze(a) for a in call.args[1:])
        kwargs = tuple(sorted((k, freeze(v)) for k, v in call.kwargs.items()))
        self.of_memory = info.name == "aten::as_strided.default"
        if self.of_memory:
            # The offset counts from the start of the memory; by default it is the base's own.
            bound = dict(zip(info.argument_names[1:], args, strict=False)) | dict(kwargs)
            if bound.get("storage_offset") is None:
                bound["storage_offset"] = base_form.offset
            args, kwargs = (), tuple(sorted(bound.items()))
        for index, meta in enumerate(metas):
            assert meta is not None
            which = index if self.returns_list else None
            op = None if self.of_memory else info.func
            self.steps.append(ViewStep(info.view, args, kwargs, which, meta.shape, op))

    def make(self, base: Any) -> Any:
        """The view or views of ``base``."""
        if torch.is_inference_mode_enabled() and not base.is_inference():
            # As in torch, such a view is an ordinary tensor, which shares its base's version.
            with torch.inference_mode(False):
                return self._make(base)
        return self._make(base)

    def _make(self, base: Any) -> Any:
        storage, steps = base._storage_, base._steps
        if storage.viewers is ONE_VIEWER:
            storage.introduce(base)
        if self.identity:
            return type(base)(storage, base._form if steps else storage.form, steps)
        if self.of_memory:
            steps = (*steps, *_memory_order(base._form))
        results = [
            tensor_class(form)(storage, form, (*steps, step))
            for form, step in zip(self.forms, self.steps, strict=True)
        ]
        return results if self.returns_list else results[0]


def _memory_order(form: Form) -> tuple[ViewStep, ...]:
    """The view of a tensor whose row-major order is the order of its memory.

    Raises:
        UnsupportedOpError: the tensor's strides have gaps, so its memory isn't its elements.
    """
    if form.stride == contiguous_stride(form.shape):
        return ()
    order = tuple(sorted(range(len(form.shape)), key=lambda d: -form.stride[d]))
    shape = tuple(form.shape[d] for d in order)
    expected = contiguous_stride(shape)
    if any(
        form.shape[d] > 1 and form.stride[d] != step
        for d, step in zip(order, expected, strict=True)
    ):
        raise UnsupportedOpError(
            f"as_strided of a tensor of shape {list(form.shape)} and strides {list(form.stride)}: "
            "its memory has gaps or overlaps; call .contiguous() first"
        )
    permute = info_of(torch.ops.aten.permute.default).view
    assert permute is not None
    return (ViewStep(permute, (order,), (), None, shape),)


class Plan:
    """A computing call.

    Attributes:
        run: takes the leaves (arrays, numbers) and the bases of mutated views; returns the arrays
            of all results, then of all mutated storages. ``run.eager`` is its executable. Both are
            None where the tensors have no value.
        result_forms: per result that aliases no argument, its form (None for an undefined one).
        mutated: the leaf indices of the arguments written, in schema order.
        base_forms: their storages' forms after the write.
        grown: per argument written None, or the form with which it gets memory of its own: ``out=``
            of another shape than the result's.
        random: whether the executable takes the generator's state first.
        of_scalars: whether it computes scalars from scalars alone, and nothing else.
        structure: arranges new tensors and mutated arguments as torch returns them.
    """

    __slots__ = (
        "base_forms",
        "eager",
        "grown",
        "info",
        "mutated",
        "of_scalars",
        "random",
        "result_forms",
        "run",
        "structure",
    )

    run: Any
    eager: Any

    def __init__(self, call: Call, tensors: list[Any]) -> None:
        info = call.info
        self.info = info
        lowered = lowered_function(info)
        self.mutated = mutated_leaves(call)
        metas = _meta_results(call)
        fresh = [m for m, _ in metas_of_fresh(call, metas)]
        for meta in fresh:
            if meta is not None:
                meta.offset = 0  # memory of its own
        self.result_forms = output_forms(call, fresh)
        self.structure = _structure(call, metas)
        bases = [tensors[i] for i in self.mutated]
        self.grown = _grown(call, metas, bases)
        _refuse_overlap(info, [call.forms[i] for i in self.mutated])
        before = [b._storage_.form for b in bases]
        frame = _where(call)[1]
        axes = varying_axes(call, frame)
        self.base_forms = [
            _written_form(base, axes, frame, info) if grown is None else grown
            for base, grown in zip(bases, self.grown, strict=True)
        ]
        if has_no_value(call):
            _refuse_meta_write(info, before)
            self.run = self.eager = None
            self.random = self.of_scalars = False
            return
        self.run, self.eager, self.random = _functions(
            call,
            lowered,
            self.result_forms,
            bases,
            before,
            self.base_forms,
            self.grown,
            self.mutated,
            pins(call, _where(call)[0], fresh),
        )
        forms = [*call.forms, *self.result_forms, *self.base_forms]
        self.of_scalars = not self.random and all(
            f.shape == () and not f.varying for f in forms if isinstance(f, Form)
        )


def tensor_class(form: Form) -> Any:
    """The tensor class that shows ``form``."""
    return XLAShardedTensor if form.mesh is not None else XLATensor


def new_tensor(array: Any, form: Form) -> Any:
    """A tensor with a storage of its own."""
    cls = XLAShardedTensor if form.mesh is not None else XLATensor
    return cls.__new__(cls, Storage(array, form), form)


def _functions(
    call: Call,
    lowered: Any,
    result_forms: list[Form | None],
    bases: list[Any],
    before: list[Form],
    after: list[Form],
    grown: list[Form | None],
    mutated: list[int],
    pinned: Pins | None,
) -> tuple[Callable[..., Any], Any, bool]:
    # The functions live as long as the plan: they must not hold the call, which holds its tensors.
    info, forms = call.info, list(call.forms)
    args, kwargs = call.args, call.kwargs
    writes_expected = len(bases)
    steps = [b._steps if new is None else () for b, new in zip(bases, grown, strict=True)]
    own_forms = [forms[i] if new is None else new for i, new in zip(mutated, grown, strict=True)]

    unread = info.name in READ_NO_VALUES
    stand_in = lambda form: jnp.zeros(form.shape, form.jax_dtype)

    def on_one_device(keys: Any, leaves: Any, pad: bool) -> list[Any]:
        values = [
            leaf if not isinstance(form, Form) else stand_in(form) if unread else form.logical(leaf)
            for leaf, form in zip(leaves, forms, strict=True)
        ]
        if pinned is not None:
            values = list(map(_pin, values, pinned.leaves))
        fresh, writes = lowered(keys, fill(list(args), values), _fill_kwargs(kwargs, values))
        out: list[Any] = []
        for i, (value, form) in enumerate(zip(fresh, result_forms, strict=False)):
            if form is None:
                continue
            if value is None:  # masked out, which torch's meta kernel hasn't looked at
                value = jnp.zeros(form.shape, form.jax_dtype)
            value = _checked(value, form.shape, form.jax_dtype, info)
            if pinned is not None:
                value = _pin(value, pinned.results[i])
            out.append(form.physical(value) if pad else value)
        for j, value in enumerate(writes[:writes_expected]):
            if not random:  # numbers drawn for an integer tensor are whole
                _check_castable(value, own_forms[j])
            value = _checked(value, own_forms[j].shape, own_forms[j].jax_dtype, info)
            if pinned is not None:
                value = _pin(value, pinned.written)
            out.append(value)
        return out

    frame = _where(call)[1]
    varying = [f.varying if isinstance(f, Form) and not unread else () for f in forms]
    axes = union(frame, varying)
    any_sharded = any(isinstance(form, Form) and form.is_sharded for form in forms)

    def on_devices(keys: Any, leaves: Any, pad: bool) -> list[Any]:
        def one(index: Any, *own_leaves: Any) -> list[Any]:
            # Each device draws numbers of its own where it varies.
            own_keys = lambda: jax.random.fold_in(keys(), index)
            return on_one_device(own_keys, own_leaves, pad)

        assert frame is not None
        mapped = over_devices(one, [axes, *varying], frame, any_sharded)
        return mapped(coordinate(frame, axes), *leaves)

    def run(keys: Any, leaves: Any, base_arrays: Any, pad: bool) -> list[Any]:
        out = (on_devices if axes else on_one_device)(keys, leaves, pad)
        first = len(out) - writes_expected
        for j, base in enumerate(base_arrays):
            value = out[first + j]
            if steps[j]:
                placed = before[j].placed(after[j].frame)
                value = write_through(base, placed, steps[j], value, axes)
            out[first + j] = after[j].physical(value) if pad else value
        if pad:
            # A result that is an argument as it came would share its buffer, and writes to one
            # donate buffers.
            given = {id(leaf) for leaf in leaves}
            out = [jnp.copy(value) if id(value) in given else value for value in out]
        return out

    shardings = [f.sharding for f in result_forms if f is not None] + [f.sharding for f in after]

    def eager(state: Any, leaves: Any, base_arrays: Any) -> list[Any]:
        from xla_dtensor import rng

        count = [0]

        def keys() -> Any:
            count[0] += 1
            return rng.key_of(state, count[0] - 1)

        return run(keys, leaves, base_arrays, True)

    sharded = any(s is not None for s in shardings)
    jitted = jax.jit(eager, out_shardings=shardings) if sharded else jax.jit(eager)
    random = bool(info.lowering is not None and info.lowering.random) or (
        info.lowering is None and torch.Tag.nondeterministic_seeded in info.func.tags
    )
    return run, jitted, random


def _pin(value: Any, sharding: Any) -> Any:
    return value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)


def _fill_kwargs(kwargs: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    return {name: fill(value, values) for name, value in kwargs.items()}


def _checked(value: Any, shape: tuple[int, ...], dtype: Any, info: OpInfo) -> Any:
    value = jnp.asarray(value)
    if tuple(value.shape) != shape:
        if info.mutated and value.size <= max(1, _numel(shape)):
            return jnp.broadcast_to(value, shape).astype(dtype)
        raise AssertionError(
            f"the lowering of {info.name} gave shape {tuple(value.shape)} where torch gives "
            f"{shape}: a bug in xla_dtensor, please report it"
        )
    return _cast(value, dtype)


_CATEGORIES = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}


def _check_castable(value: Any, form: Form) -> None:
    """Refuse to write a result to a tensor that would lose its fraction or imaginary part.

    torch's meta kernels let numbers through here (``int_tensor.mul_(0.5)``).
    """
    result = jnp.result_type(value)
    wanted = _CATEGORIES.get(form.jax_dtype.kind, 2)
    if wanted and _CATEGORIES.get(result.kind, 2) > wanted:
        raise RuntimeError(
            f"result type {to_torch_dtype(result)} can't be cast to the desired output type "
            f"{form.dtype}"
        )


def _cast(value: Any, dtype: Any) -> Any:
    if value.dtype == dtype:
        return value
    if value.dtype.kind == "c" and dtype.kind != "c":
        value = value.real
    if value.ndim == 0 and value.dtype == np.float64 and dtype == np.float32:
        trace = _context.current()
        if trace is not None and trace.wide is not None:
            return trace.wide.narrowed(value)
    return value.astype(dtype)


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def mutated_leaves(call: Call) -> list[int]:
    """The indices of the leaves that the call writes to, in schema order."""
    result = []
    for where in call.info.mutated:
        value = call.args[where] if isinstance(where, int) else call.kwargs.get(where)
        result += [slot.index for slot in flatten_results(value) if isinstance(slot, Slot)]
    return result


def _meta_results(call: Call) -> list[Any]:
    """Per schema return a `Meta`, None, or a list of them."""
    if not call.info.returns_mutated:
        return []
    leaves = []
    for leaf, form in zip(call.leaves, call.forms, strict=True):
        if isinstance(form, Form):
            leaves.append(_meta_tensor(form))
        else:
            symbolic = isinstance(leaf, torch.SymFloat | torch.SymInt)
            leaves.append(form(1) if symbolic else form(leaf))
    kwargs = _fill_kwargs(call.kwargs, leaves) | call.meta_kwargs
    if "device" in call.info.argument_names:
        kwargs["device"] = torch.device("meta")
    args = fill(list(call.args), leaves)
    with torch.no_grad():
        if call.info.shapes is not None:
            out = _own_meta(call.info, args, kwargs)
        else:
            out = call.info.func(*args, **kwargs)
    results = [out] if len(call.info.returns_mutated) == 1 else list(out)
    if call.info.view is not None and call.info.returns_lists[0]:
        return [Meta(t) for t in results[0]]
    return [
        [Meta(t) for t in r] if isinstance(r, list | tuple) else None if r is None else Meta(r)
        for r in results
    ]


def _own_meta(info: OpInfo, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What our own meta kernel says: it knows neither ``out=`` nor where tensors are."""
    assert info.shapes is not None
    kwargs = {k: v for k, v in kwargs.items() if k not in info.mutated and k not in DROPPED}
    out = info.shapes(*args, **kwargs)
    # That of the functional overload also gives what the arguments become.
    count = len(info.returns_mutated)
    return out[:count] if isinstance(out, tuple) and count > 1 else out


def _meta_tensor(form: Form) -> torch.Tensor:
    if not form.offset:
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
    reach = form.offset + 1
    reach += sum((n - 1) * step for n, step in zip(form.shape, form.stride, strict=True) if n)
    memory = torch.empty(reach, dtype=form.dtype, device="meta")
    return memory.as_strided(form.shape, form.stride, form.offset)


def metas_of_fresh(call: Call, metas: list[Any]) -> list[tuple[Meta | None, int]]:
    """The metas of results that alias no argument, flat, with their schema return's position."""
    flat: list[tuple[Meta | None, int]] = []
    for position, (meta, alias) in enumerate(zip(metas, call.info.returns_mutated, strict=True)):
        if alias is None:
            flat += [(m, position) for m in flatten_results(meta)]
    return flat


def output_forms(call: Call, metas: list[Meta | None]) -> list[Form | None]:
    """The form of each result: its meta data from torch, its layout from the rules."""
    mesh, frame = _where(call)
    axes = varying_axes(call, frame)
    valueless = has_no_value(call)
    if mesh is None:
        return [
            None
            if m is None
            else device_form(frame, m.shape, m.stride, m.offset, m.dtype, axes, valueless)
            for m in metas
        ]
    if not any(m is not None for m in metas):
        return [None for _ in metas]
    placements = output_placements(call, mesh, metas)
    return [
        None
        if m is None
        else sharded_form(
            mesh, p, m.shape, m.stride, m.offset, m.dtype, varying=axes, meta=valueless
        )
        for m, p in zip(metas, placements, strict=True)
    ]


def _refuse_meta_write(info: OpInfo, written: list[Form]) -> None:
    for form in written:
        if not form.meta:
            raise NotImplementedError(
                f"{info.name}: Cannot copy out of meta tensor; no data! (into a tensor of shape "
                f"{list(form.shape)})"
            )


def _written_form(tensor: Any, axes: tuple[str, ...], frame: Any, info: OpInfo) -> Form:
    """The form of a tensor's storage after the write of a value that varies along ``axes``.

    Raises:
        UnsupportedOpError: what the devices hold of a sharded tensor would differ along an axis
            along which the sharded tensor doesn't.
    """
    form, own, steps = tensor._storage_.form, tensor._form, tensor._steps
    if not (steps and isinstance(steps[0], LayoutStep)):
        form = form.reduced()  # else written in the parts that the devices hold
    if not set(axes) - set(own.varying):
        return form
    if any(isinstance(step, LayoutStep) for step in tensor._steps):
        raise UnsupportedOpError(
            f"{info.name}: the written tensor {list(own.shape)} is what devices hold of a sharded "
            f"tensor, the same along {sorted(set(axes) - set(own.varying))}, and would differ "
            "there; write to a copy (x.to_local().clone())"
        )
    return form.placed(frame).with_varying(union(frame, [form.varying, axes]))


# They take shape, dtype and layout from a tensor, and nothing that differs from device to device.
READ_NO_VALUES = frozenset(
    f"aten::{name}.default"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)


def has_no_value(call: Call) -> bool:
    """Whether a tensor of the call is on the meta device, and so all results."""
    return any(isinstance(form, Form) and form.meta for form in call.forms)


def varying_axes(call: Call, frame: Any) -> tuple[str, ...]:
    """The axes along which the call's results vary: those of all tensors whose values it reads."""
    if call.info.name in READ_NO_VALUES:
        return ()
    forms = [form for form in call.forms if isinstance(form, Form)]
    for form in forms:
        if form.varying:
            check_axes(call.info.name, form, frame)
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
                frame = frame_of(frame.root)  # the finer one has all meshes' axes
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


_FILLS = frozenset({"aten::fill_.Scalar", "aten::fill_.Tensor", "aten::zero_.default"})


def _refuse_overlap(info: OpInfo, written: list[Form]) -> None:
    """Raise for a write to an expanded tensor, as torch's kernels do; filling it is no problem."""
    if info.name in _FILLS:
        return
    for form in written:
        if any(n > 1 and not step for n, step in zip(form.shape, form.stride, strict=True)):
            raise RuntimeError(
                f"{info.name}: more than one element of the written-to tensor {list(form.shape)} "
                "refers to a single memory location; clone() the tensor before writing to it"
            )


def _grown(call: Call, metas: list[Any], bases: list[Any]) -> list[Form | None]:
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
    return output_forms(call, changed)


def _structure(call: Call, metas: list[Any]) -> Callable[[list[Any], list[Any]], Any]:
    """A function that arranges results as the schema returns them."""
    aliases = call.info.returns_mutated
    if not aliases:
        return lambda results, mutated: None
    if len(aliases) == 1 and aliases[0] is None and not call.info.returns_lists[0]:
        return lambda results, mutated: results[0]
    if len(aliases) == 1 and aliases[0] is not None and not call.info.returns_lists[0]:
        return lambda results, mutated: mutated[0]
    counts = [
        None if alias is not None else len(meta) if isinstance(meta, list) else -1
        for meta, alias in zip(metas, aliases, strict=True)
    ]

    def arrange(results: list[Any], mutated: list[Any]) -> Any:
        remaining = iter(results)
        out = []
        for count, alias in zip(counts, aliases, strict=True):
            if alias is not None:
                out.append(mutated[alias])
            elif count == -1:
                out.append(next(remaining))
            else:
                assert count is not None
                out.append([next(remaining) for _ in range(count)])
        return out[0] if len(out) == 1 else tuple(out)

    return arrange
