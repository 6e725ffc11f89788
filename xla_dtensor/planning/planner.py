"""``xd.plan``: compiles a step for devices without running it, and reports what XLA says of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compilation import CompiledStep, compile
from xla_dtensor.compilation.call.sources import ArgumentSource
from xla_dtensor.errors import TopologyError
from xla_dtensor.mesh import device_order
from xla_dtensor.mesh.domains import domains
from xla_dtensor.planning import memory as memory_of
from xla_dtensor.planning.collectives import collectives
from xla_dtensor.planning.flops import flops
from xla_dtensor.planning.host_copies import HOST, host_copies
from xla_dtensor.planning.inputs import inputs
from xla_dtensor.planning.kept import Said, digest, said
from xla_dtensor.planning.links import links
from xla_dtensor.planning.program_text import HloText
from xla_dtensor.planning.report import Report
from xla_dtensor.planning.rows import Row, exposed_per_dim, rows, seconds_per_dim
from xla_dtensor.planning.schedule import Schedule, schedule
from xla_dtensor.planning.text import size
from xla_dtensor.plans.shard_map_call import platform_of
from xla_dtensor.runtime import abstract, topologies
from xla_dtensor.runtime.chips import chip_of, fraction
from xla_dtensor.runtime.jax_runtime import own_device
from xla_dtensor.runtime.memory import memory_of as granted_memory
from xla_dtensor.runtime.program_cache import not_kept


def plan(
    step: Callable[..., Any],
    *args: Any,
    topology: str | None = None,
    mesh: Any = None,
    tokens: int | None = None,
    compiler_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """What a training step needs per chip, without the chips: it is traced, compiled for them by
    XLA, and not run. Of ``xd.abstract``'s tensors, or of tensors that are there.

    Args:
        step: a function, or what `xla_dtensor.compile` has made of it.
        args: its arguments; they stay as they are, as the step's tensors do.
        topology: of what devices the program is to be; it has to be that of the `abstract` block
            in which the tensors were made, and needn't be given.
        mesh: the mesh that the step's tensors are on; it needn't be given.
        tokens: what a step computes; by default the elements of its largest argument of integers,
            or the length of its first argument.
        compiler_options: for XLA, by name; a `CompiledStep` has its own.
        kwargs: the step's.

    Returns:
        a `Report`, which `print` shows as a table; also where the program doesn't fit into the
        chip's memory.

    Raises:
        TopologyError: the mesh doesn't fill the topology, or the step has no mesh there. (Of
            devices that are here it needs none: it is a program for one.)
        DataDependentError: the step wants a value in Python.

    Example::

        import torch, xla_dtensor as xd

        with xd.abstract("cpu:8"):
            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            model = torch.nn.Linear(64, 64)
            xd.distribute_module(model, mesh)
            x = xd.distribute_tensor(torch.randn(16, 64), mesh, [xd.Shard(0), xd.Replicate()])
            report = xd.plan(lambda x: model(x).square().mean().backward(), x)
        assert report.collectives[0].kind == "all-reduce" and report.memory.arguments > 64 * 64 * 4
    """
    given = {"topology": topology, "mesh": mesh, "tokens": tokens}
    return lowered_plan(step, args, kwargs, **given, compiler_options=compiler_options)()


def lowered_plan(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    topology: str | None = None,
    mesh: Any = None,
    tokens: int | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[], Report]:
    """The first half of `plan`, with its arguments: the step is traced and lowered. What is
    returned asks the compiler, in any thread, beside others, and outside of the `abstract` block,
    too."""
    if not isinstance(step, CompiledStep):
        step = compile(step, compiler_options=compiler_options)
    current = abstract.current()
    if topology is not None and (current is None or current.name != topology):
        where = "no xd.abstract block" if current is None else f"that of {current.name}"
        raise TopologyError(
            f"xd.plan(topology={topology!r}) in {where}: devices are part of layouts; make mesh, "
            f"model and arguments, and call xd.plan, in `with xd.abstract({topology!r}):`"
        )
    seen = step.looked_at(args, kwargs, _look)
    frame = seen["frame"]
    if frame is None:
        if mesh is not None or current is not None:
            raise TopologyError(
                "xd.plan: the step's tensors are on no mesh, so it is a program for one device of "
                "this machine; lay them out on one, mesh = xd.init_device_mesh('xla', ...)"
            )
    elif mesh is not None and mesh.size() != len(frame.device_ids):
        raise TopologyError(
            f"xd.plan(mesh=): {mesh!r} has {mesh.size()} devices, and the step's tensors are on "
            f"{frame.root!r}, which has {len(frame.device_ids)}"
        )
    elif current is not None and len(frame.device_ids) != len(current.devices):
        raise TopologyError(
            f"the step's mesh {frame!r} has {len(frame.device_ids)} devices, and {current.name} "
            f"{len(current.devices)}: give it dims whose sizes multiply to that, or take a "
            "topology of that size"
        )
    if tokens is None:
        leaves = pytree.tree_leaves(args)
        tokens = _tokens(x for x in leaves if isinstance(x, torch.Tensor))
    seen["options"] = abstract.compiler_options(seen["options"])
    # In the block, of which a compiler's thread knows nothing.
    seen["available"] = granted_memory(_devices(frame).flat[0])
    return functools.partial(_compiled_report, _name(step), seen, current, tokens)


def report_of(step: Any, program: Any) -> Report:
    """The `Report` on a program that a compiled step runs on devices that are here.

    Args:
        step: the step.
        program: one of its ``programs()``. Of one whose results have a history only the forward
            pass's collectives are in it, and the operations of both.
    """
    with jax.enable_x64(True):
        available = granted_memory(_devices(program.frame).flat[0])
        found = _said_of(program.executable.compiled, available, ())
        sources = itertools.chain(*program.input_sources().values())
        given = [source for source in sources if isinstance(source, ArgumentSource)]
        given.sort(key=lambda source: source.argument)
        tokens = _tokens(source.form for source in given)
        seen = _of_program(program, program.jaxpr)
        return _report(_name(step), seen, None, tokens, found)


def _look(program: Any) -> dict[str, Any]:
    """What is to be known of a program, while the optimizer's state that its trace has made is
    there."""
    return {
        "compile": program.executable.compile,
        "lowered": program.executable.lowered,
        "options": program.options,
        **_of_program(program, program.executable.jaxpr),
    }


def _of_program(program: Any, jaxpr: Any) -> dict[str, Any]:
    return {
        "frame": program.frame,
        "inputs": inputs(program),
        "flops": flops(jaxpr, platform_of(program.frame)),
        "domains": domains(list(_devices(program.frame).flat)),
    }


def _name(step: Any) -> str:
    return str(getattr(step, "__qualname__", None) or getattr(step, "__name__", "step"))


def _tokens(given: Iterable[Any]) -> int | None:
    """What the step computes in one go: of tokens their number, of other batches their length.

    Args:
        given: tensors, or their forms, in the order of the arguments.
    """
    batches = [each for each in given if each.shape]
    whole = [math.prod(b.shape) * _several(b) for b in batches if not b.dtype.is_floating_point]
    if whole:
        return max(whole)
    return next((int(b.shape[0]) * _several(b) for b in batches), None)


def _several(given: Any) -> int:
    """How many tensors it is: a per-device one is another on each device."""
    form: Any = getattr(given, "_form", given)
    if getattr(form, "frame", None) is None:
        return 1
    return math.prod(form.frame.sizes[axis] for axis in form.varying)


def _compiled_report(
    name: str, seen: dict[str, Any], topology: topologies.Topology | None, tokens: int | None
) -> Report:
    """What is reported of a program that `_look` has seen, which is compiled for that."""
    return _report(name, seen, topology, tokens, _compiled(seen, topology))


def _report(
    name: str,
    seen: dict[str, Any],
    topology: topologies.Topology | None,
    tokens: int | None,
    found: Said,
) -> Report:
    frame = seen["frame"]
    sizes = {} if frame is None else {axis.name: axis.size for axis in frame.axes}
    devices = _devices(frame)
    device = devices.flat[0]
    chip = chip_of(device.platform, device) if topology is None else topology.chip
    memory, text, cost = found.memory, found.text, found.cost
    all_inputs = seen["inputs"]
    program = HloText(text)
    moved = collectives(program, devices.shape, tuple(sizes), list(devices.flat))
    apart = seen["domains"] if len(set(seen["domains"])) > 1 else []
    over = None if chip is None else links(chip, devices, tuple(sizes))
    in_time, copies = Schedule(), host_copies(program)
    if chip is not None and over is not None and text:
        in_time = schedule(program, moved, over, chip, copies)
    table = rows(moved, all_inputs, over, in_time.exposed, apart)
    slow = sum(row.slow_bytes for row in table)
    hops: dict[str, float] = {}
    if chip is not None and not chip.is_switched:
        hops = dict(zip(sizes, device_order.mean_hops(devices), strict=True))
    per_device = float(cost.get("flops", 0.0))
    seconds: dict[str, float] = {}
    if chip is not None and memory.arguments is not None and memory.outputs is not None:
        operations = {kind: count / devices.size for kind, count in seen["flops"].items()}
        # XLA:GPU doesn't count what a program reads and writes. It's not less than what goes in
        # and comes out.
        moved_bytes = cost.get("bytes accessed", memory.arguments + memory.outputs)
        seconds = {
            "compute": max(chip.seconds(operations), per_device / (chip.flops / chip.devices)),
            "memory": moved_bytes / (chip.memory_bandwidth / chip.devices),
            **{f"network {dim}": t for dim, t in seconds_per_dim(table).items()},
        }
        if apart:
            between = "network between " + ("hosts" if chip.is_switched else "slices")
            seconds[between] = slow / (chip.network / chip.devices)
        if copies:
            copied = sum(copy.bytes * copy.times for copy in copies.values())
            seconds["the host's memory"] = copied / (chip.host / chip.devices)
    exposed = exposed_per_dim(table) if in_time.seconds else {}
    if copies and in_time.seconds:
        exposed[HOST] = sum(in_time.exposed.get(name, 0.0) for name in copies)
    return Report.made(
        step=name,
        topology="" if topology is None else topology.name,
        chips=devices.size if topology is None else topology.chips,
        mesh=sizes,
        hops=hops,
        was_read=bool(text),
        memory=memory,
        inputs=all_inputs,
        collectives=table,
        flops_by_kind=dict(seen["flops"]),
        flops_per_device=per_device,
        peak=None if chip is None else chip.flops,
        seconds=seconds,
        scheduled=in_time.seconds or None,
        exposed=exposed,
        stretches=tuple(in_time.stretches),
        tokens=tokens,
        notes=(*found.notes, *_of_slow_links(table, slow)),
        slow_bytes=slow,
        domains=len(set(apart)) or 1,
        source="" if chip is None else chip.source,
    )


def _of_slow_links(table: Sequence[Row], slow: float) -> tuple[str, ...]:
    """What to say of activations that go over the slow network, if they are more than a few."""
    found = [row for row in table if row.slow_bytes and not row.of_parameters]
    moved = sum(row.slow_bytes for row in found)
    if moved < max(_FEW, slow / 10):
        return ()
    dims = sorted({dim for row in found for dim in row.dims})
    return (
        f"{size(moved)} of activations come in at a device over the slow network between slices or "
        f"hosts, along {', '.join(dims)}: give dims along which activations travel no more devices "
        "than a slice or host has, and let the mesh's outermost dims be those of data parallelism",
    )


_FEW = 2**20  # bytes


def _devices(frame: Any) -> Any:
    """JAX's; the one device of a step on no mesh is an array without dims."""
    return np.array(own_device()) if frame is None else frame.jax_mesh.devices


def _compiled(seen: dict[str, Any], topology: topologies.Topology | None) -> Said:
    """What the compiler says of the program."""
    with jax.enable_x64(True):
        options, available = seen["options"], seen["available"]
        if topology is None or topology.is_here:
            return _asked(seen["compile"], options, available, ())
        notes = (_GRANTED.format(fraction()),) if topology.is_of_gpus else ()

        def ask() -> Said:
            with not_kept(), tempfile.TemporaryDirectory() as dump:
                dumped = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
                more = dumped if topology.kind in _UNREADABLE else {}
                return _asked(seen["compile"], {**options, **more}, available, notes, dump)

        devices = seen["frame"].jax_mesh.devices.flat
        return said(digest(seen["lowered"], options, topology, devices, available), ask)


def _asked(
    compile_with: Callable[[dict[str, Any]], Any],
    options: dict[str, Any],
    available: float | None,
    notes: tuple[str, ...],
    dump: str = "",
) -> Said:
    """What XLA says while it compiles.

    Args:
        dump: the folder that it may have written the program's text to.
    """
    try:
        compiled = compile_with(options)
    except Exception as error:
        found = memory_of.of_refusal(error) if memory_of.is_refusal(error) else None
        if found is None:
            raise
        why = "XLA has refused the program for want of memory, so the rest is unknown"
        return Said(found, "", {}, (*notes, why))
    return _said_of(compiled, available, notes, dump)


def _said_of(
    compiled: Any, available: float | None, notes: tuple[str, ...], dump: str = ""
) -> Said:
    """What XLA says of what it has compiled."""
    text = ""
    try:
        text = (_dumped(dump) if dump else "") or compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        why = (
            "the program can't be read, so its collectives are unknown: this libtpu writes "
            f"what this jaxlib doesn't know ({str(error).splitlines()[0]})"
        )
        notes = (*notes, why)
    return Said(memory_of.of_compiled(compiled, available), text, _cost(compiled), notes)


_GRANTED = (
    "of a GPU's memory JAX gives programs {:.2f} (XLA_CLIENT_MEM_FRACTION), and XLA:GPU compiles a "
    "program that needs more"
)

# Of these libtpu's programs have instructions that this JAX can't read back (libtpu 0.0.52, jaxlib
# 0.10.2), so that libtpu writes their text itself.
_UNREADABLE = ("v5p", "tpu7x")


def _dumped(folder: str) -> str:
    """The text of the program that XLA has written to ``folder``; "" if there is none."""
    found = sorted(Path(folder).glob("*.after_optimizations.txt"))
    return found[-1].read_text() if found else ""


def _cost(compiled: Any) -> dict[str, float]:
    with contextlib.suppress(NotImplementedError):
        found = compiled.cost_analysis()
        if isinstance(found, list):
            found = found[0] if found else {}
        return dict(found or {})
    return {}
