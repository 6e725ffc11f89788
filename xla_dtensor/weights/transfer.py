"""`transfer`: the weights of a model on one mesh as those of another, from device to device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base import executor
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, sharded_form
from xla_dtensor.forms.read import read
from xla_dtensor.forms.sharing import launching
from xla_dtensor.mesh.placements import normalize_placements
from xla_dtensor.runtime import arrays, processes
from xla_dtensor.runtime.abstract_array import AbstractArray
from xla_dtensor.tensors.of_form import is_ours, new_tensor
from xla_dtensor.weights import checksums
from xla_dtensor.weights.moves import Moves, WeightSource
from xla_dtensor.weights.recipes import Places, Recipe, places, sources_of

Tensors: TypeAlias = Mapping[str, torch.Tensor] | nn.Module
PlacementsOf: TypeAlias = (
    Sequence[Placement] | Callable[[str, tuple[int, ...]], Sequence[Placement]] | None
)


class Transferred(dict[str, torch.Tensor]):
    """What `transfer` returns: the tensors by name.

    Attributes:
        bytes: the most that one of its programs took on a device beside its operands, as XLA says.
        count: how many pieces were copied.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2,))
        state = {"w": xd.distribute_tensor(torch.ones(4), mesh, [xd.Shard(0)])}
        found = xd.transfer(state, mesh, limit=8)
        assert found.count == 4 and found.bytes <= 8
    """

    bytes: int
    count: int


def transfer(
    state: Tensors,
    to: DeviceMesh | Tensors,
    placements: PlacementsOf = None,
    *,
    names: Mapping[str, Recipe] | None = None,
    dtype: torch.dtype | None = None,
    limit: int | None = None,
    check: bool = False,
) -> Transferred:
    """The weights of one model as those of another: a trainer's for a sampler.

    Each device that is to have a part of a weight gets it from those that have it, whatever the two
    meshes are: other devices, another shape, uneven shards. Nothing is gathered. With several
    processes, all call it, and the values go over the host.

    Everything that doesn't fit raises before anything is written. A weight that is written is whole
    at each moment, but the weights one after the other: a sampler shouldn't run meanwhile.

    Args:
        state: the weights there are: a module, or tensors on xla devices by name.
        to: a mesh, for new tensors; or the module or the tensors to write to, in whose layouts the
            weights then are. Compiled steps that use these need no other program.
        placements: on a mesh, of all tensors; or a function of a name and a shape that gives them.
            By default replicated.
        names: what the new weights are, by their names, where it isn't the weight of that name: the
            name of another one, a `weights.Fused` or a `weights.PartOf`.
        dtype: of the new floating-point weights; by default the one that they have.
        limit: how many bytes a device may need at a time beside what it has and is to have: larger
            pieces are cut. Of what XLA says of the programs. Not with several processes.
        check: compare checksums of the old and the new weights, of all bits and their places, on
            each device.

    Returns:
        the new weights (with ``to`` tensors, these), and what it took.

    Raises:
        ValueError: a weight has another shape or dtype than the one to write to, isn't used, or
            isn't there; a recipe doesn't fit; ``limit`` can't be kept.
        TypeError: something is no tensor on xla devices.
        UnsupportedOpError: of a tensor that differs from device to device or has a pending
            reduction; in a compiled step.
        RuntimeError: (with ``check``) the checksums differ.

    Example::

        import torch, xla_dtensor as xd

        train = xd.DeviceMesh("xla", [0, 1, 2, 3])
        sample = xd.DeviceMesh("xla", [[4, 5], [6, 7]])
        model = torch.nn.Linear(8, 4, bias=False)
        trainer = xd.distribute_module(model, train)
        found = xd.transfer(trainer, sample, [xd.Shard(0), xd.Shard(1)], check=True)
        assert found["weight"].to_local().shape == (2, 4)
    """
    executor.current().not_in_step("xd.transfer in a compiled step, which is of one mesh")
    if limit is not None and processes.several():
        raise ValueError("transfer: limit= with several processes, whose values go over the host")
    tensors = _tensors(state, "state")
    mesh = to if isinstance(to, DeviceMesh) else None
    targets = None if isinstance(to, DeviceMesh) else _tensors(to, "to")
    if targets is not None and placements is not None:
        raise ValueError("transfer: placements= of tensors that have some already")
    recipes = _recipes(names or {}, tensors, targets)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    jobs = []
    for name, recipe in recipes.items():
        what = places(name, recipe, shapes)
        sources = [tensors[source] for source in what.sources]
        cast = _dtype(name, sources, dtype)
        if targets is not None:
            target = targets[name]
            _check_fits(name, what.shape, cast, target)
            form = target._form
        else:
            assert mesh is not None
            given = placements(name, what.shape) if callable(placements) else placements
            placed = normalize_placements(given, mesh, len(what.shape), f"transfer of {name!r}")
            form, target = sharded_form(mesh, placed, what.shape, dtype=cast), None
        _check_form(name, form, "is to be")
        jobs.append(_Job(name, what, sources, form, target))
    return _done(jobs, Moves(limit), check)


class _Job:
    """One weight.

    Args:
        name: of the new weight.
        what: it consists of.
        sources: those tensors.
        form: of the new weight.
        target: the tensor to write to, if there is one.
    """

    def __init__(
        self, name: str, what: Places, sources: list[Any], form: Form, target: Any
    ) -> None:
        self.name, self.what, self.sources, self.form = name, what, sources, form
        self.target = target
        # Of tied weights it is the same.
        of = what.of.tobytes(), what.at.tobytes(), what.dim, what.shape
        self.key = form, of, tuple((id(s._storage_), s._steps) for s in sources)


def _done(jobs: Iterable[_Job], moves: Moves, check: bool) -> Transferred:
    result, known = Transferred(), {}
    written: dict[int, _Job] = {}
    for job in jobs:
        if job.target is not None:
            other = written.setdefault(id(job.target._storage_), job)
            if other.key != job.key:
                raise ValueError(
                    f"transfer: {job.name!r} and {other.name!r} are tied, and would get two values"
                )
    for job in jobs:
        if job.key not in known:
            known[job.key] = _moved(job, moves, check)
        made = known[job.key]
        result[job.name] = made
    result.bytes, result.count = moves.bytes, moves.count
    return result


def _moved(job: _Job, moves: Moves, check: bool) -> Any:
    # Another thread's step may take the arrays over.
    with launching(), jax.enable_x64(True):
        found = [_array(source) for source in job.sources]
        array = moves.build(job.what, list(map(WeightSource, found)), job.form)
        if check:
            _compare(job, found, array)
        if job.target is None:
            return new_tensor(array, job.form)
        job.target._storage_.write(array, job.form)
        return job.target


def _array(tensor: Any) -> Any:
    array = tensor._form.fetched(read(tensor)) if tensor._form.memory else read(tensor)
    if isinstance(array, AbstractArray):
        raise UnsupportedOpError("xd.transfer of a tensor of xd.abstract(), which has no value")
    # JAX sends nothing from process to process but in programs of both.
    return array if array.is_fully_addressable else arrays.get(array)


def _compare(job: _Job, found: list[Any], array: Any) -> None:
    wanted = checksums.of_sources(job.what, found, job.form.jax_dtype)
    got = checksums.of_target(array, job.form)
    if got != {wanted}:
        raise RuntimeError(
            f"transfer: {job.name!r} isn't what it was on its way from "
            f"{', '.join(job.what.sources)}: the checksums differ ({wanted:016x}; {got})"
        )


def _tensors(given: Tensors, what: str) -> dict[str, Any]:
    """The tensors by name; of a module its parameters and buffers that are saved."""
    found = given.state_dict(keep_vars=True) if isinstance(given, nn.Module) else dict(given)
    for name, tensor in found.items():
        if not is_ours(tensor):
            where = f"a tensor on {tensor.device}" if hasattr(tensor, "device") else repr(tensor)
            raise TypeError(
                f"transfer: {what}[{name!r}] is {where[:80]}; it has to be on xla devices"
            )
        if what == "to" and tensor._steps:
            raise ValueError(f"transfer: to[{name!r}] is a view: give the tensor that it is of")
        _check_form(name, tensor._form, "is")
    return found


def _recipes(
    names: Mapping[str, Recipe], tensors: dict[str, Any], targets: dict[str, Any] | None
) -> dict[str, Recipe]:
    """Of each new weight what it is.

    Raises:
        ValueError: one has no source, or a source has no use.
    """
    taken = {source for recipe in names.values() for source in sources_of(recipe)}
    if targets is None:
        recipes = {**{name: name for name in tensors if name not in taken}, **names}
    else:
        recipes = {name: names.get(name, name) for name in targets}
        if others := names.keys() - targets.keys():
            raise ValueError(f"transfer: nothing to write to for {', '.join(sorted(others))}")
    used = {source for recipe in recipes.values() for source in sources_of(recipe)}
    if missing := used - tensors.keys():
        raise ValueError(f"transfer: there is no {', '.join(sorted(missing))} in the state")
    if left := tensors.keys() - used:
        raise ValueError(
            f"transfer: {', '.join(sorted(left))} would go nowhere: say in names= what they are "
            "part of, or leave them out of the state"
        )
    return recipes


def _dtype(name: str, sources: list[Any], dtype: torch.dtype | None) -> torch.dtype:
    kinds = {source.dtype for source in sources}
    if len(kinds) > 1:
        raise ValueError(f"transfer: {name!r} is fused of {', '.join(map(str, kinds))}")
    (own,) = kinds
    return dtype if dtype is not None and own.is_floating_point else own


def _check_fits(name: str, shape: tuple[int, ...], dtype: torch.dtype, target: Any) -> None:
    if shape != tuple(target.shape) or dtype != target.dtype:
        raise ValueError(
            f"transfer: {name!r} is {list(shape)} {dtype}, and the tensor to write to is "
            f"{list(target.shape)} {target.dtype}"
            + ("" if dtype == target.dtype else f": give dtype={target.dtype}")
        )


def _check_form(name: str, form: Form, verb: str) -> None:
    if form.varying or form.unreduced or form.meta:
        kind = "a meta tensor" if form.meta else f"{form!r}, which differs from device to device"
        raise UnsupportedOpError(f"transfer: {name!r} {verb} {kind}")
    if verb == "is to be" and (form.sharding is None or form.memory is not None):
        raise UnsupportedOpError(
            f"transfer: {name!r} is to be {form!r}: its devices have to be those of a mesh (one of "
            "one device will do), and the value in their own memory"
        )
