"""Compiling one call as dispatch would, and what XLA made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from torch.distributed.device_mesh import DeviceMesh

from tools.rule_check.samples import Sample
from xla_dtensor.base import executor
from xla_dtensor.base.random import rng
from xla_dtensor.debug.communication import collectives
from xla_dtensor.errors import PlacementError
from xla_dtensor.forms.form import Form, sharded_form
from xla_dtensor.forms.storage import Storage
from xla_dtensor.forms.views import read_through
from xla_dtensor.mesh import from_partition_spec
from xla_dtensor.plans.call import Call
from xla_dtensor.plans.ops import info_of
from xla_dtensor.plans.plan import Plan
from xla_dtensor.plans.view_plan import ViewPlan
from xla_dtensor.rules.merging import Placements
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


@dataclass(frozen=True)
class Compiled:
    """One call, compiled for given input layouts.

    Attributes:
        claimed: the layouts that dispatch gives the results.
        collectives: of the program whose results are in those layouts, by kind.
        chosen: compiles again, and gives the layouts that XLA gives the results when it may choose;
            None for one that no placements express.
    """

    claimed: list[Placements]
    collectives: Counter[str]
    chosen: Callable[[], list[Placements | None]]


def compile_call(sample: Sample, inputs: Sequence[Placements], mesh: DeviceMesh) -> Compiled:
    """Compile `sample` with its tensors laid out as `inputs`.

    Raises:
        UnsupportedOpError: the op has no lowering.
    """
    forms = [
        sharded_form(mesh, placements, like.shape, dtype=like.dtype)
        for like, placements in zip(sample.likes, inputs, strict=True)
    ]
    # Tensors without data: nothing is run.
    tensors = [XLAShardedTensor(Storage(None, form), form) for form in forms]
    args, kwargs = sample.filled(iter(tensors))
    call = Call(info_of(sample.func), args, kwargs)
    with _outside_of_traces():
        return (_view if call.info.view is not None else _computation)(call, mesh)


@contextmanager
def _outside_of_traces() -> Iterator[None]:
    """As dispatch runs its executables."""
    with jax.enable_x64(True), executor.running_at_once():
        yield


def _computation(call: Call, mesh: DeviceMesh) -> Compiled:
    plan = Plan(call, call.leaves)
    results = [form for form in (*plan.result_forms, *plan.base_forms) if form is not None]
    state = rng.words() if plan.random else None
    leaves = [_abstract(form) for form in call.forms]
    bases = [None] * len(plan.mutated)

    def free(state: Any, leaves: Any) -> Any:
        counter = iter(range(1_000_000))
        return plan.run(lambda: rng.key_of(state, next(counter)), leaves, bases, False)

    program = plan.eager.jitted.lower(state, leaves, bases).compile()
    return Compiled(
        _placements(results),
        collectives(program.as_text()),
        partial(_chosen, mesh, free, state, leaves),
    )


def _view(call: Call, mesh: DeviceMesh) -> Compiled:
    """What reading a view computes (`dispatch/_read.py`)."""
    plan = ViewPlan(call)
    form, own = call.forms[0], plan.forms

    def read(array: Any) -> list[Any]:
        steps = [read_through(array, form, (step,)) for step in plan.steps]
        return steps or [form.logical(array)]

    def laid_out(array: Any) -> list[Any]:
        pairs = zip(own, read(array), strict=True)
        return [f.physical(value.astype(f.jax_dtype)) for f, value in pairs]

    shardings = [f.sharding for f in own]
    program = jax.jit(laid_out, out_shardings=shardings).lower(_abstract(form)).compile()
    return Compiled(
        _placements(own),
        collectives(program.as_text()),
        partial(_chosen, mesh, read, _abstract(form)),
    )


def _abstract(form: Any) -> Any:
    if isinstance(form, Form):
        return jax.ShapeDtypeStruct(form.padded_shape, form.jax_dtype, sharding=form.sharding)
    return form(1)


def _placements(forms: Sequence[Form]) -> list[Placements]:
    return [form.placements for form in forms if form.placements is not None]


def _chosen(mesh: DeviceMesh, function: Any, *arguments: Any) -> list[Placements | None]:
    with _outside_of_traces():
        compiled = jax.jit(function).lower(*arguments).compile()
    result: list[Placements | None] = []
    for sharding in compiled.output_shardings:
        spec = getattr(sharding, "spec", None)
        try:
            result.append(None if spec is None else from_partition_spec(spec, mesh))
        except PlacementError:  # it cuts a mesh dim apart, which placements can't say
            result.append(None)
    return result
