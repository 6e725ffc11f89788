"""``linear``, ``rms_norm`` and attention, which reach XLA whole: what autograd does with them is
torch's."""

from __future__ import annotations

import re
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
import torch.nn.attention
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import xla_dtensor as xd
from tests.parallel.harness import collectives, full
from xla_dtensor.rules import replicate_rule

pytestmark = pytest.mark.filterwarnings(  # torch's own, when it first differentiates forward
    "ignore:.torch.jit.script. is deprecated",
    "ignore:There is a performance drop",
    "ignore:Attempted to insert a get_attr Node",
)


def place(value: torch.Tensor, where: str, mesh: Any) -> torch.Tensor:
    if where == "cpu":
        return value.clone()
    if where == "device":
        return value.to("xla")
    return distribute_tensor(value, mesh, [Shard(0), Replicate()])


CHANGES = {
    "data": lambda w: setattr(w, "data", w.data * 3),
    "set": lambda w: setattr(w, "data", torch.zeros_like(w)),
    "nothing": lambda w: None,
}


@pytest.mark.parametrize("where", ["device", "sharded"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_moves_between_forward_and_backward(
    change: str, shape: tuple[int, ...], bias: bool, where: str, mesh_2x4: Any
) -> None:
    values = torch.randn(8, 6), torch.randn(8), torch.randn(shape)
    found = []
    for device in ("cpu", where):
        w, b, x = (place(v, device, mesh_2x4).requires_grad_() for v in values)
        out = F.linear(x, w, b if bias else None).pow(2).sum()
        CHANGES[change](w)
        out.backward()
        found.append([full(w.grad), full(x.grad), full(w.detach())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_several_passes_wait_while_a_weight_moves() -> None:
    """Each has what the weight was when it was saved."""
    found = []
    for device in ("cpu", "xla"):
        x = torch.ones(2, 4).to(device).requires_grad_()
        w = torch.ones(5, 4).to(device).requires_grad_()
        outs = []
        for factor in (1, 3, 5):
            w.data = w.data * factor
            outs += [F.linear(x, w).sum(), F.linear(x, w * 2).sum()]
        found.append([torch.autograd.grad(out, x)[0].tolist() for out in outs])
    assert found[0] == found[1]


def test_a_batched_input_that_moves() -> None:
    found = []
    for device in ("cpu", "xla"):
        x = torch.ones(2, 3, 4).to(device).requires_grad_()
        w = torch.ones(5, 4).to(device).requires_grad_()
        out = F.linear(x, w).sum()
        x.data = x.data * 7
        out.backward()
        found.append(w.grad.tolist())
    assert found[0] == found[1]


def test_another_dtype_between_forward_and_backward() -> None:
    found = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        layer.to(device)
        x = torch.ones(2, 4, device=device, requires_grad=True)
        out = layer(x).sum()
        layer.bfloat16()
        out.backward()
        found.append(x.grad.tolist())
    torch.testing.assert_close(*map(torch.tensor, found))


def test_differentiating_again_after_a_move_is_refused() -> None:
    w = torch.ones(2, 2, device="xla", requires_grad=True)
    x = torch.ones(1, 2, device="xla", requires_grad=True)
    out = F.linear(x, w).pow(2).sum()
    w.data = w.data * 3
    with pytest.raises(RuntimeError, match=r"differentiated again.*\.data ="):
        torch.autograd.grad(out, x, create_graph=True)


def attention(q: Any) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # CPU torch's others
        return F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True).pow(2).sum()


def linear(x: Any) -> Any:
    return F.linear(x, x * 2).pow(2).sum()


def rms_norm(x: Any) -> Any:
    return F.rms_norm(x, (4,), x[0] * 2, 0.1).pow(3).sum()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("function", [attention, linear, rms_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "transform", ["grad", "vmap_grad", "jvp", "vjp", "jacrev", "jacfwd", "hessian", "dual"]
)
def test_transforms(transform: str, function: Any) -> None:
    value = torch.randn(3, 2, 4, 4)[0] if function is attention else torch.randn(4, 4)
    apply = {
        "grad": lambda x: torch.func.grad(function)(x),
        "vmap_grad": lambda x: torch.func.vmap(torch.func.grad(function))(
            torch.stack([x, 2 * x, 3 * x])
        ),
        "jvp": lambda x: torch.func.jvp(function, (x,), (x,))[1],
        "vjp": lambda x: torch.func.vjp(function, x)[1](torch.ones((), device=x.device))[0],
        "jacrev": lambda x: torch.func.jacrev(function)(x),
        "jacfwd": lambda x: torch.func.jacfwd(function)(x),
        "hessian": lambda x: torch.func.hessian(function)(x),
        "dual": dual_of(function),
    }[transform]
    expected = apply(value.double())
    found = apply(value.double().to("xla")).cpu()
    torch.testing.assert_close(found, expected)


BY_PARTS: dict[str, Any] = {
    "dropout": lambda q, mask: F.scaled_dot_product_attention(q, q.sin(), q + 1, mask, 1e-9),
    "torch.func": lambda q, mask: torch.func.vjp(
        lambda q: F.scaled_dot_product_attention(q, q.sin(), q + 1, mask), q
    )[0],
    "2-D": lambda q, mask: F.scaled_dot_product_attention(q[0, 0], q[0, 0].sin(), q[0, 0], mask),
    "keys of one batch": lambda q, mask: F.scaled_dot_product_attention(
        q, q[:1].sin(), q[:1], mask
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ["device", "sharded"])
@pytest.mark.parametrize("way", BY_PARTS)
def test_a_boolean_mask_hides_where_attention_is_taken_apart(
    way: str, where: str, mesh_2x4: Any
) -> None:
    attend = BY_PARTS[way]
    torch.manual_seed(0)
    q, mask = torch.randn(2, 4, 6, 8), torch.rand(6, 6) > 0.5
    mask[:, 0] = True
    mask[0, 1:] = False
    leaf = q.clone().requires_grad_()
    expected = attend(leaf, mask)
    (grad,) = torch.autograd.grad(expected.sin().sum(), leaf)
    own = place(q, where, mesh_2x4).requires_grad_()
    found = attend(own, place(mask, where, mesh_2x4))
    torch.testing.assert_close(full(found.detach()), expected.detach())
    (found_grad,) = torch.autograd.grad(found.sin().sum(), own)
    torch.testing.assert_close(full(found_grad), grad)


def dual_of(function: Any) -> Any:
    def tangent(x: Any) -> Any:
        with fw.dual_level():
            return fw.unpack_dual(function(fw.make_dual(x, x * 2))).tangent

    return tangent


def test_gradcheck_forward_and_backward() -> None:
    layer = nn.Linear(3, 2).double().to("xla")
    x = torch.randn(2, 3, dtype=torch.float64, device="xla", requires_grad=True)
    assert torch.autograd.gradcheck(layer, x, check_forward_ad=True)
    with fw.dual_level():
        out = fw.unpack_dual(layer(fw.make_dual(x.detach(), torch.ones_like(x))))
    expected = F.linear(torch.ones(2, 3, dtype=torch.float64), layer.weight.detach().cpu())
    torch.testing.assert_close(out.tangent.cpu(), expected)


@pytest.mark.parametrize("where", ["device", "sharded"])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)], ids=["2-D", "3-D"])
def test_linear_of_complex_numbers(shape: tuple[int, ...], where: str, mesh_2x4: Any) -> None:
    """torch's gradients are conjugates, and so are those of a gradient (``create_graph``)."""
    values = [torch.randn(*s, dtype=torch.complex128) for s in ((8, 6), (8,), shape)]
    found = []
    for device in ("cpu", where):
        leaves = [place(v, device, mesh_2x4).requires_grad_() for v in values]
        weight, bias, x = leaves
        out = torch.view_as_real(F.linear(x, weight, bias)).pow(3).sum()
        once = torch.autograd.grad(out, leaves, retain_graph=True)
        again = torch.autograd.grad(out, leaves, create_graph=True)
        twice = torch.autograd.grad(sum(g.abs().square().sum() for g in again), leaves)
        found.append([full(g.detach()) for g in (*once, *again, *twice)])
    torch.testing.assert_close(found[1], found[0])


def test_traces_of_torch_fx() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.tensor([1.0, 2.0, 3.0], device="xla")
    out, tangent = torch.func.linearize(lambda x: x * x, x)
    assert out.tolist() == [1, 4, 9]
    assert tangent(torch.ones(3, device="xla")).tolist() == [2, 4, 6]
    graph = make_fx(lambda t: (t.view(3) * x).sum())(torch.ones(3, device="xla"))
    assert graph(torch.tensor([1.0, 0.0, 2.0], device="xla")).item() == 7


def test_a_weight_that_has_not_moved_is_not_kept_alive() -> None:
    x = torch.ones(2, 3, 4, device="xla", requires_grad=True)
    w = torch.ones(5, 4, device="xla", requires_grad=True)
    outs = [F.linear(x, w).sum() for _ in range(3)]
    for out in outs:
        out.backward()
    del out, outs
    storage = weakref.ref(w._storage_)
    w.data = w.data * 2
    assert storage() is None
    storage = weakref.ref(w._storage_)
    out = F.linear(x, w).sum()
    w.data = w.data * 2
    assert storage() is not None
    del out
    assert storage() is None


def test_a_weight_is_gathered_once_for_both_passes() -> None:
    """Were the gradient taken with the transposed weight, XLA would gather that one, too."""
    mesh8 = xd.init_device_mesh("xla", (8,))
    values = [0.1 * torch.randn(s) for s in ((16, 4, 24), (40, 24), (8, 40))]
    leaves = [distribute_tensor(v, mesh8, [Shard(0)]).requires_grad_() for v in values]

    def run(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> list[torch.Tensor]:
        F.linear(F.linear(x, up).relu(), down).pow(2).sum().backward()
        return [x.grad, up.grad, down.grad]  # type: ignore[list-item]

    step = xd.compile(run)
    found = step(*leaves)
    expected = run(*(v.clone().requires_grad_() for v in values))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(full(other), one, rtol=1e-4, atol=1e-4)
    gathered = collectives(step)["all-gather"]
    assert (gathered[40 * 24], gathered[8 * 40]) == (1, 1)


class Calls(TorchDispatchMode):
    """The operations that are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **kwargs or {})


# By name the layout of `x`, how many dims are normalized, the dtypes of `x` and the weight, and
# whether it is one operation.
NORMS: dict[str, Any] = {
    "rows whole": ((Shard(0), Replicate()), 1, torch.float32, torch.float32, True),
    "cut over rows twice": ((Shard(0), Shard(1)), 1, torch.float32, torch.float32, True),
    "no weight": ((Shard(0), Replicate()), 1, torch.float32, None, True),
    "two dims": ((Replicate(), Shard(0)), 2, torch.float32, torch.float32, True),
    "bfloat16": ((Shard(0), Replicate()), 1, torch.bfloat16, torch.bfloat16, True),
    "a wider weight": ((Shard(0), Replicate()), 1, torch.bfloat16, torch.float32, False),
    "complex": ((Shard(0), Replicate()), 1, torch.complex64, torch.complex64, False),
    "features cut": ((Shard(0), Shard(2)), 1, torch.float32, torch.float32, False),
    "one of two dims cut": ((Shard(0), Shard(1)), 2, torch.float32, torch.float32, False),
}


@pytest.mark.parametrize("name", NORMS)
def test_rms_norm_is_one_operation_where_rows_are_whole(name: str, mesh_2x4: Any) -> None:
    placements, dims, dtype, weight_dtype, whole = NORMS[name]
    torch.manual_seed(0)
    x, grad = torch.randn(4, 8, 16).to(dtype), torch.randn(4, 8, 16).to(dtype)
    weight = None if weight_dtype is None else torch.randn(x.shape[-dims:]).to(weight_dtype)

    def run(x: Any, weight: Any, grad: Any) -> list[Any]:
        out = F.rms_norm(x, x.shape[-dims:], weight, 0.1)
        inputs = (x,) if weight is None else (x, weight)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    leaf = x.clone().requires_grad_()
    own_weight = None if weight is None else weight.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        expected = run(leaf, own_weight, grad)
        own = distribute_tensor(x, mesh_2x4, placements).requires_grad_()
        on_mesh = (
            None
            if weight is None
            else distribute_tensor(weight, mesh_2x4, [Shard(0), Replicate()]).requires_grad_()
        )
        own_grad = distribute_tensor(grad, mesh_2x4, placements)
        with Calls() as calls:
            found = run(own, on_mesh, own_grad)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    for one, other in zip(expected, found, strict=True):
        assert other.dtype is one.dtype
        torch.testing.assert_close(full(other), one, **tolerance)
    assert found[0].placements == placements  # rows are gathered in neither way
    norms = {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"}
    assert (norms <= set(calls.names)) == whole
    assert ("aten::rsqrt" in calls.names) != whole


@pytest.mark.parametrize("cut", [True, False])
def test_rms_norm_in_inference_mode_lies_where_it_does_without(cut: bool, mesh_2x4: Any) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8, 16), torch.randn(16)
    own = distribute_tensor(x, mesh_2x4, [Shard(0), Shard(2) if cut else Replicate()])
    on_mesh = distribute_tensor(weight, mesh_2x4, [Replicate()] * 2)
    with torch.inference_mode():
        found = F.rms_norm(own, (16,), on_mesh, 0.1)
    torch.testing.assert_close(full(found), F.rms_norm(x, (16,), weight, 0.1))
    assert found.placements == own.placements  # type: ignore[attr-defined]


def test_a_rule_of_ones_own_for_rms_norm_is_asked_of_cut_rows(scratch: None, mesh_2x4: Any) -> None:
    own = distribute_tensor(torch.randn(4, 8, 16), mesh_2x4, [Shard(0), Shard(2)])
    assert F.rms_norm(own, (16,)).placements == own.placements  # type: ignore[attr-defined]
    xd.register_rule("aten::_fused_rms_norm", replicate_rule, override=True)
    assert F.rms_norm(own, (16,)).placements == (Replicate(), Replicate())  # type: ignore[attr-defined]


@pytest.mark.parametrize("place_of_x", [(Shard(0), Replicate()), (Shard(0), Shard(2))], ids=str)
@pytest.mark.parametrize(("shape", "of_weight"), [((15,), None), ((16,), (8,)), ((), None)])
def test_rms_norm_of_other_shapes_says_what_torch_says(
    shape: tuple[int, ...], of_weight: Any, place_of_x: Any, mesh_2x4: Any
) -> None:
    x = torch.randn(4, 8, 16)
    weight = None if of_weight is None else torch.ones(of_weight)
    with pytest.raises(RuntimeError) as expected:
        F.rms_norm(x, shape, weight)
    own = distribute_tensor(x, mesh_2x4, place_of_x)
    on_mesh = None if weight is None else distribute_tensor(weight, mesh_2x4, [Replicate()] * 2)
    with pytest.raises(RuntimeError, match=re.escape(str(expected.value).splitlines()[0])):
        F.rms_norm(own, shape, on_mesh)


@pytest.mark.slow
def test_rms_norm_gradcheck_twice() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, device="xla", requires_grad=True)
    weight = torch.randn(3, dtype=torch.float64, device="xla", requires_grad=True)
    norm = lambda x, weight: F.rms_norm(x, (3,), weight, 0.1)
    assert torch.autograd.gradcheck(norm, (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(norm, (x, weight))


def test_ranks_of_cpu_tensors_are_written(mesh_2x4: Any) -> None:
    """Torch before 2.13 forgets it while a dispatch mode is on, as one is with the first mesh."""
    rank = torch.full((), 9)
    torch.linalg.matrix_rank(torch.eye(5), out=rank)
    assert rank == 5
