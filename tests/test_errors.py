"""Bad input: the exception's type, the builtin that torch raises there, and the whole message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dt
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd

R, S = Replicate(), Shard


def mesh() -> DeviceMesh:
    return xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


def unnamed(*shape: int) -> DeviceMesh:
    return xd.init_device_mesh("xla", shape)


def pair() -> DeviceMesh:
    return DeviceMesh("xla", [3, 1])


def sharded(on: DeviceMesh | None = None) -> DTensor:
    on = on or mesh()
    return distribute_tensor(torch.ones(4), on, [S(0), *[R] * (on.ndim - 1)])


def varying() -> xd.XLATensor:
    return xd.from_device_values([torch.full((4,), float(i)) for i in range(8)], mesh())


MESH = "DeviceMesh((dp=2, tp=4), 'xla', stride=(4, 1))"
PAIR = "DeviceMesh((2,), 'xla', stride=(1,))"
ALL = "[0, 1, 2, 3, 4, 5, 6, 7]"
OF_EACH_DEVICE = (
    "has a different value on each device, and one process drives them all: "
    "xla_dtensor.collectives.axis_index(mesh, dim) has the coordinate along a dim as a per-device "
    "tensor; full_tensor(), local_shards and collectives see every device"
)
ON_THE_HOST = (
    "its value on the host (.cpu(), .item(), printing, ...) would differ from device to device. "
    "Look at .local_values() (one CPU tensor per device), or make it one value first: "
    "DTensor.from_local(x, mesh, placements).full_tensor(), or a collective (all_reduce, "
    "all_gather_tensor)"
)
Case = tuple[Callable[[], Any], type[Exception], type[Exception], str]

CASES: dict[str, Case] = {
    "vary along no dim of the mesh": (
        lambda: xd.from_device_values([torch.ones(2)] * 8, mesh(), vary=["dp", "nope"]),
        xd.MeshDimError,
        KeyError,
        f"from_device_values(vary=['dp', 'nope']): {MESH} has no mesh dim 'nope'; it has 'dp', "
        "'tp'",
    ),
    "vary along a dim of a mesh without names": (
        lambda: xd.from_device_values([torch.ones(2)] * 2, pair(), vary=["dp"]),
        xd.MeshDimError,
        KeyError,
        f"from_device_values(vary=['dp']): {PAIR} has no mesh dim 'dp'; it has no names",
    ),
    # Wrong number of placements.
    "too few placements": (
        lambda: distribute_tensor(torch.ones(4), mesh(), [S(0)]),
        xd.PlacementError,
        ValueError,
        f"distribute_tensor: got 1 placements [Shard(dim=0)] for {MESH}, which has 2 dims; give "
        "one placement per mesh dim",
    ),
    "too many placements": (
        lambda: sharded().redistribute(placements=[R, R, S(0)]),
        xd.PlacementError,
        ValueError,
        f"redistribute: got 3 placements [Replicate(), Replicate(), Shard(dim=0)] for {MESH}, "
        "which has 2 dims; give one placement per mesh dim",
    ),
    "no placements": (
        lambda: dt.zeros(4, device_mesh=mesh(), placements=[]),
        xd.PlacementError,
        ValueError,
        f"zeros: got 0 placements [] for {MESH}, which has 2 dims; give one placement per mesh dim",
    ),
    "placements left out": (
        lambda: sharded().redistribute(),
        RuntimeError,
        RuntimeError,
        f"redistribute() of a tensor on {MESH}: placements is needed, one per mesh dim",
    ),
    "too few gradient placements": (
        lambda: sharded().full_tensor(grad_placements=[R]),
        xd.PlacementError,
        ValueError,
        f"full_tensor(grad_placements=): got 1 placements [Replicate()] for {MESH}, which has 2 "
        "dims; give one placement per mesh dim",
    ),
    # A shard dim out of range.
    "shard dim too large": (
        lambda: distribute_tensor(torch.ones(4, 4), mesh(), [S(2), R]),
        xd.PlacementError,
        ValueError,
        f"distribute_tensor: Shard(dim=2) on {MESH}: the tensor has 2 dims, so a shard dim is "
        "from -2 to 1",
    ),
    "shard dim too small": (
        lambda: dt.rand(4, device_mesh=mesh(), placements=[R, S(-2)]),
        xd.PlacementError,
        ValueError,
        f"rand: Shard(dim=-2) on {MESH}: the tensor has 1 dims, so a shard dim is from -1 to 0",
    ),
    "shard dim of a scalar": (
        lambda: distribute_tensor(torch.tensor(1.0), mesh(), [S(0), R]),
        xd.PlacementError,
        ValueError,
        f"distribute_tensor: Shard(dim=0) on {MESH}: the tensor has 0 dims, so a shard dim is "
        "impossible; use Replicate()",
    ),
    "not a placement": (
        lambda: distribute_tensor(torch.ones(4), mesh(), ["dp", R]),
        xd.PlacementError,
        ValueError,
        "distribute_tensor: 'dp' is not a placement; use Replicate(), Shard(dim) or Partial()",
    ),
    # Mixed Partial reductions, and Partial out of nothing.
    "mixed reductions": (
        lambda: distribute_tensor(torch.ones(4), mesh(), [Partial("sum"), Partial("max")]),
        xd.PlacementError,
        ValueError,
        "distribute_tensor: mixed Partial reductions ['max', 'sum'] in [Partial(sum), "
        f"Partial(max)] on {MESH} have no defined order; reduce one of them first (redistribute "
        "it to Replicate)",
    ),
    "unknown reduction": (
        lambda: distribute_tensor(torch.ones(4), mesh(), [Partial("median"), R]),
        xd.PlacementError,
        ValueError,
        f"distribute_tensor: Partial('median') on {MESH}: the reductions are sum, avg, max, min, "
        "product",
    ),
    "redistribute to Partial": (
        lambda: sharded().redistribute(placements=[Partial(), R]),
        xd.PlacementError,
        RuntimeError,
        f"redistribute: mesh dim 0 of {MESH} is Shard(dim=0); only an operation makes a value "
        "Partial(sum), redistribute can't",
    ),
    "fill parts or sum": (
        lambda: dt.ones(4, device_mesh=mesh(), placements=[Partial(), R]),
        xd.UnsupportedOpError,
        NotImplementedError,
        f"ones with Partial(sum) on {MESH}: what is filled, the parts or the sum? Make it "
        "Replicate() and shard or reduce it",
    ),
    # A mesh larger than the devices; meshes that are none.
    "more devices than there are": (
        lambda: unnamed(4, 4),
        xd.DeviceCountError,
        RuntimeError,
        "DeviceMesh('xla', ...) wants device 15, so 16 devices, but JAX has 8 cpu device(s): JAX "
        "was started before this mesh was made, so simulated devices can't be added any more. "
        "Make the largest mesh first, or set JAX_NUM_CPU_DEVICES=16 before the program starts",
    ),
    "a device number too large": (
        lambda: DeviceMesh("xla", [0, 8]),
        xd.DeviceCountError,
        RuntimeError,
        "DeviceMesh('xla', ...) wants device 8, so 9 devices, but JAX has 8 cpu device(s): JAX "
        "was started before this mesh was made, so simulated devices can't be added any more. "
        "Make the largest mesh first, or set JAX_NUM_CPU_DEVICES=9 before the program starts",
    ),
    "a device twice": (
        lambda: DeviceMesh("xla", [0, 1, 0]),
        xd.MeshError,
        RuntimeError,
        "DeviceMesh('xla', [0, 1, 0]): device numbers must be distinct and not negative; they are "
        "positions in jax.devices()",
    ),
    "a negative device": (
        lambda: DeviceMesh("xla", [-1, 0]),
        xd.MeshError,
        RuntimeError,
        "DeviceMesh('xla', [-1, 0]): device numbers must be distinct and not negative; they are "
        "positions in jax.devices()",
    ),
    "no devices": (
        lambda: unnamed(2, 0),
        xd.MeshError,
        RuntimeError,
        "DeviceMesh('xla', ...): the mesh has no devices; every mesh dim needs a size of 1 or more",
    ),
    "an empty list of devices": (
        lambda: DeviceMesh("xla", []),
        xd.MeshError,
        RuntimeError,
        "DeviceMesh('xla', ...): the mesh has no devices; every mesh dim needs a size of 1 or more",
    ),
    # Slices.
    "unnamed mesh sliced by name": (
        lambda: unnamed(8)["tp"],
        xd.MeshError,
        RuntimeError,
        "cannot slice DeviceMesh((8,), 'xla', stride=(1,)) by ('tp',): it has no mesh_dim_names; "
        "pass them to init_device_mesh",
    ),
    "a name that no dim has": (
        lambda: mesh()["dp", "cp"],
        xd.MeshDimError,
        KeyError,
        f"{MESH} has no mesh dim 'cp'; its dims are ('dp', 'tp')",
    ),
    "a dim that the slice left out": (
        lambda: mesh()["dp"]["tp"],
        xd.MeshDimError,
        KeyError,
        "DeviceMesh((dp=2), 'xla', stride=(4,)) has no mesh dim 'tp'; its dims are ('dp',)",
    ),
    "a dim twice": (
        lambda: mesh()["tp", "tp"],
        xd.MeshDimError,
        KeyError,
        f"{MESH}[('tp', 'tp')]: name each mesh dim once",
    ),
    "no dim": (
        lambda: mesh()[()],
        xd.MeshDimError,
        KeyError,
        f"{MESH}[()]: name one or more of its dims ('dp', 'tp')",
    ),
    # What one process can't say.
    "get_rank": (
        lambda: mesh().get_rank(),
        xd.PerDeviceValueError,
        RuntimeError,
        f"{MESH}.get_rank() {OF_EACH_DEVICE}",
    ),
    "get_local_rank": (
        lambda: mesh().get_local_rank("tp"),
        xd.PerDeviceValueError,
        RuntimeError,
        f"{MESH}.get_local_rank('tp') {OF_EACH_DEVICE}",
    ),
    "get_local_rank of the only dim": (
        lambda: mesh()["tp"].get_local_rank(),
        xd.PerDeviceValueError,
        RuntimeError,
        f"DeviceMesh((tp=4), 'xla', stride=(1,)).get_local_rank(None) {OF_EACH_DEVICE}",
    ),
    "get_coordinate": (
        lambda: mesh().get_coordinate(),
        xd.PerDeviceValueError,
        RuntimeError,
        f"{MESH}.get_coordinate() {OF_EACH_DEVICE}",
    ),
    "rank of a group": (
        lambda: mesh().get_group("tp").rank(),
        xd.PerDeviceValueError,
        RuntimeError,
        "the rank in group 'xla:0,1,2,3,4,5,6,7:dp=2,tp=4:tp' differs from device to device, and "
        "one process drives them all: xla_dtensor.collectives.axis_index(mesh, dim) has it as a "
        "per-device tensor",
    ),
    "group of a mesh of several dims": (
        lambda: mesh().get_group(),
        xd.MeshError,
        RuntimeError,
        f"{MESH} has 2 dims: say which group is meant, (mesh, dim) or mesh.get_group(dim)",
    ),
    # What differs from device to device.
    "item of a varying tensor": (
        lambda: varying().sum().item(),
        xd.PerDeviceValueError,
        RuntimeError,
        f"a per-device tensor of shape [] varies along ['dp', 'tp']: {ON_THE_HOST}",
    ),
    "cpu of a varying tensor": (
        lambda: varying().cpu(),
        xd.PerDeviceValueError,
        RuntimeError,
        f"a per-device tensor of shape [4] varies along ['dp', 'tp']: {ON_THE_HOST}",
    ),
    "replicate what varies": (
        lambda: DTensor.from_local(varying(), mesh(), [R, S(0)]),
        xd.UnsupportedOpError,
        NotImplementedError,
        f"from_local(placements=[Replicate(), Shard(dim=0)]) on {MESH}: the local tensor differs "
        "from device to device along 'dp', where the placement is Replicate(). Give Shard(dim) or "
        "Partial() there, make it the same on all (a collective), or pass run_check=True, which "
        "takes coordinate 0's for all",
    ),
    "per-device and sharded": (
        lambda: varying() + sharded(),
        xd.UnsupportedOpError,
        NotImplementedError,
        f"aten::add.Tensor: a sharded tensor on {MESH} with placements [Shard(dim=0), Replicate()] "
        "can't be combined with a per-device tensor that varies along ['dp', 'tp']: is it one "
        "value per device, or a part of one value? Say which with "
        "DTensor.from_local(per_device_tensor, mesh, placements), or compute per device with "
        "sharded_tensor.to_local()",
    ),
    "uneven to_local": (
        lambda: distribute_tensor(torch.ones(5, 4), mesh(), [R, S(0)]).to_local(),
        xd.UnsupportedOpError,
        NotImplementedError,
        "to_local() of a tensor of shape [5, 4] with placements [Replicate(), Shard(dim=0)] on "
        f"{MESH}: dim 0 of size 5 doesn't divide by 4, so the devices would hold tensors of "
        "different shapes, which one process can't show as one tensor. Use full_tensor(), "
        "local_shards, or pad the dim",
    ),
    "collective on a sharded tensor": (
        lambda: xd.collectives.all_reduce(sharded(), mesh()["tp"]),
        xd.UnsupportedOpError,
        NotImplementedError,
        "all_reduce of a sharded tensor of shape [4]: collectives along dims of an xla mesh work "
        "on per-device tensors. A sharded tensor is redistributed (x.redistribute(placements=)), "
        "or made per-device with x.to_local(); a CPU tensor with x.to('xla')",
    ),
    # Tensors of different meshes.
    "a tensor on other devices": (
        lambda: sharded() + sharded(pair()),
        xd.MeshMismatchError,
        RuntimeError,
        f"aten::add.Tensor: one tensor is on {MESH} (devices {ALL}), another on {PAIR} (devices "
        "[3, 1]); bring them together with x.redistribute(device_mesh, placements)",
    ),
    "a tensor on another mesh of the same devices": (
        lambda: sharded() @ sharded(unnamed(8)),
        xd.MeshMismatchError,
        RuntimeError,
        f"aten::dot.default: one tensor is on {MESH}, another on DeviceMesh((8,), 'xla', "
        "stride=(1,)); bring them together with x.redistribute(device_mesh, placements)",
    ),
    "full tensors of different devices": (
        lambda: sharded().full_tensor() * sharded(pair()).full_tensor(),
        xd.MeshMismatchError,
        RuntimeError,
        f"aten::mul.Tensor: one tensor is on {MESH} (devices {ALL}), another on {PAIR} (devices "
        "[3, 1]); bring them together with x.redistribute(device_mesh, placements)",
    ),
    "distribute what is on another mesh": (
        lambda: distribute_tensor(sharded(), pair(), [S(0)]),
        xd.MeshMismatchError,
        ValueError,
        f"distribute_tensor: the tensor is on {MESH} already, not on {PAIR}; use "
        "redistribute(device_mesh, placements)",
    ),
    "distribute what has other placements": (
        lambda: distribute_tensor(sharded(), mesh(), [R, S(0)]),
        xd.PlacementError,
        ValueError,
        f"distribute_tensor: the tensor on {MESH} has placements [Shard(dim=0), Replicate()], not "
        "[Replicate(), Shard(dim=0)]; use redistribute(placements=)",
    ),
    # Other misuse of distribute_tensor, from_local and to_local.
    "not a leaf": (
        lambda: distribute_tensor(torch.ones(4, requires_grad=True) * 2, mesh(), [S(0), R]),
        RuntimeError,
        RuntimeError,
        "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf "
        "tensor! Use from_local or redistribute inside an autograd computation",
    ),
    "gradient of a full tensor sharded": (
        lambda: sharded().full_tensor(grad_placements=[S(0), R]),
        xd.UnsupportedOpError,
        NotImplementedError,
        f"full_tensor(grad_placements=[Shard(dim=0), Replicate()]) on {MESH}: the gradient of a "
        "full tensor is whole on every device, so it can be Replicate or Partial",
    ),
    "write into a CPU tensor": (
        lambda: torch.ones(4).add_(sharded()),
        xd.UnsupportedOpError,
        NotImplementedError,
        "aten::add_.Tensor would write an xla tensor's value into a CPU tensor; bring the value "
        "over with .cpu() or .full_tensor().cpu() first",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input(case: Case) -> None:
    call, error, builtin, message = case
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert isinstance(raised.value, builtin)
    assert str(raised.value) == message


def test_one_base() -> None:
    errors = [getattr(xd, name) for name in xd.__all__ if name.endswith("Error")]
    assert len(errors) == 20
    assert all(issubclass(error, xd.XlaDTensorError) for error in errors)


WAY_OUT = (
    "\nKeep the value on the devices (torch.where, a tensor in place of a number), return it from "
    "the step and look at it there, or move this line out of the compiled function"
)


def test_data_dependent_python() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x  # the user's line

    with pytest.raises(xd.DataDependentError) as raised:
        xd.compile(branch)(sharded())
    line = branch.__code__.co_firstlineno + 1
    assert str(raised.value) == (
        ".item() (also float(), int(), bool(), `if tensor:`) needs a value that doesn't exist "
        f"while the step is compiled\n  at {__file__}:{line}: "
        f"return x if x.sum() > 0 else -x  # the user's line{WAY_OUT}"
    )


@pytest.mark.parametrize(
    ("look", "what"),
    [
        (lambda x: (x > 0).all().item(), ".item() (also float(), int(), bool(), `if tensor:`)"),
        (lambda x: x.tolist(), "the value of a tensor of shape [4] on the host"),
        (lambda x: x.cpu(), "the value of a tensor of shape [4] on the host"),
        (lambda x: x.local_shards, "local_shards"),
        (
            lambda x: x.nonzero(),
            "aten::nonzero.default, whose result's shape depends on values "
            "(torch.nonzero_static(x, size=n) has n entries),",
        ),
    ],
)
def test_values_in_a_compiled_step(look: Callable[[Any], Any], what: str) -> None:
    assert f"\n{way_out_of(look, what)}" == WAY_OUT


def way_out_of(look: Callable[[Any], Any], what: str) -> str:
    """What the refusal of a look at a value says to do instead."""
    with pytest.raises(xd.DataDependentError) as raised:
        xd.compile(lambda x: look(x))(sharded())
    first, where, way_out = str(raised.value).split("\n")
    assert first == f"{what} needs a value that doesn't exist while the step is compiled"
    assert where.startswith(f"  at {__file__}:")
    return way_out


@pytest.mark.parametrize(
    ("look", "what"),
    [
        (lambda x: int(x.sum().item()), "what Python does with .item()"),
        (lambda x: float(x[0]), "what Python does with .item()"),
        (lambda x: 1 if x[0].item() / 2 > 3 else 0, "the decision ((.item() / 2) > 3)"),
    ],
)
def test_numbers_of_a_compiled_step(look: Callable[[Any], Any], what: str) -> None:
    known = "What .item() gives of a value that the step computes is known when"
    assert way_out_of(look, what).startswith(known)


def test_checks_of_a_distribution_in_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    normal = torch.distributions.Normal
    # `torch.compile` switches them off in the whole process, in a test before this one, say.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    step = xd.compile(lambda x: normal(x, x).log_prob(x))
    step(sharded() + 1)
    with pytest.raises(
        ValueError, match=r"aren't \(of an argument of torch.distributions"
    ) as raised:
        step(-sharded() - 1).full_tensor().cpu()
    assert __file__ in str(raised.value)


def test_a_closed_over_tensor_of_another_root_mesh() -> None:
    far = sharded(pair())

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, far * 2

    with pytest.raises(xd.MeshMismatchError) as raised:
        xd.compile(step)(sharded())
    line = step.__code__.co_firstlineno + 1
    assert str(raised.value) == (
        f"the compiled step uses tensors of {MESH} (devices {ALL}) and of {PAIR} (devices [3, 1]); "
        "one XLA program runs on one set of devices: redistribute the tensor of shape [4] to the "
        f"first mesh before the step\n  at {__file__}:{line}: return x * 2, far * 2"
    )
    with pytest.raises(xd.MeshMismatchError) as raised:
        xd.compile(lambda x: x.redistribute(pair(), [R]))(sharded())
    assert str(raised.value) == (
        f"redistribute from {MESH} to {PAIR} inside a compiled step: one XLA program runs on one "
        "set of devices; move the tensor outside of the step"
    )


def test_nothing_is_changed_by_a_refused_call() -> None:
    x = sharded()
    for call in (
        lambda: x.add_(sharded(pair())),
        lambda: x.redistribute(placements=[S(0)]),
        lambda: xd.compile(lambda y: (x.add_(y), x.tolist()))(sharded()),
    ):
        with pytest.raises(xd.XlaDTensorError):
            call()
        assert (x.placements, x.tolist()) == ((S(0), R), [1, 1, 1, 1])


def test_sparse_tensors_are_refused(mesh_2x4: DeviceMesh) -> None:
    with pytest.raises(xd.UnsupportedOpError, match=r"sparse_coo.*distribute tensor.to_dense"):
        distribute_tensor(torch.eye(4).to_sparse(), mesh_2x4, [Shard(0), Replicate()])
    x = distribute_tensor(torch.eye(4), mesh_2x4, [Shard(0), Replicate()])
    with pytest.raises(xd.UnsupportedOpError, match="_to_sparse"):
        x.to_sparse()
