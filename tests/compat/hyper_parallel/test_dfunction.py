"""The behaviour that HyperParallel's public ``tests/torch/shard/_dfunction.py`` asks for (9 tests,
on a 2x2 mesh), and ``shard_module`` by a plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_dtensor as xd
from xla_dtensor.compat import hyper_parallel
from xla_dtensor.compat.hyper_parallel import (
    DFunction,
    DistributedOp,
    DTensor,
    Layout,
    Partial,
    Replicate,
    Shard,
    ShardingPlan,
    _build_layout,
    distribute_tensor,
    get_distributed_op,
    init_device_mesh,
    shard_module,
)

R = Replicate()


class AddOp(DistributedOp):
    def __init__(self) -> None:
        super().__init__("compat add")

    def preprocess(self, args: Any, kwargs: Any) -> Any:
        x, y = args
        return (x.to_local(), y.to_local()), {}, [x.layout, y.layout]

    def infer_layout(self, cache_values: Any) -> Any:  # type: ignore[override]
        self._check_partial_inputs(cache_values[:1])
        return ((cache_values[0],), None)


class Add(DFunction):
    _op_name = "compat add"

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, grad


class ReluOp(DistributedOp):
    def __init__(self) -> None:
        super().__init__("compat relu")

    def preprocess(self, args: Any, kwargs: Any) -> Any:
        return (args[0].to_local(),), {}, [args[0].layout]

    def infer_layout(self, cache_values: Any) -> Any:  # type: ignore[override]
        self._check_partial_inputs(cache_values)
        return ((cache_values[0],), None)


class Relu(DFunction):
    _op_name = "compat relu"

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x > 0).to(grad.dtype)


def linear_layout(x: Any, w: Any) -> Layout:
    """Of ``x @ w.T``, made as HyperParallel's own ops make theirs: in two steps, then pending."""
    if x.alias_tensor_map[-1] != w.alias_tensor_map[-1]:
        raise ValueError("Contracting dimensions must have the same layout")
    base = Layout(mesh_shape=x.mesh_shape, alias_name=x.alias_name, rank_list=x.rank_list)
    out = base(*x.alias_tensor_map[:-1], w.alias_tensor_map[0])
    contracted = x.alias_tensor_map[-1]
    if contracted != "None":
        for axis in contracted if isinstance(contracted, tuple) else (contracted,):
            out.set_partial_by_dev_axis(axis, "sum")
    return out


class LinearOp(DistributedOp):
    def __init__(self) -> None:
        super().__init__("compat linear")

    def preprocess(self, args: Any, kwargs: Any) -> Any:
        x, w, *bias = args
        values = [x.layout, w.layout, bool(bias)]
        return (x.to_local(), w.to_local(), *bias), {}, values

    def infer_layout(self, cache_values: Any) -> Any:  # type: ignore[override]
        x, w, _ = cache_values
        self._check_partial_inputs([x, w])
        return ((linear_layout(x, w),), None)

    def get_expand_impl(self, func: Any, infer_result: Any, cache_values: Any) -> Any:  # type: ignore[override]
        x, _, has_bias = cache_values
        contracted = x.alias_tensor_map[-1]
        if contracted == "None" or not has_bias:
            return None
        count = x.mesh.get_device_num_along_axis(contracted)
        return lambda x, w, bias: func(x, w, bias / count)


class Linear(DFunction):
    _op_name = "compat linear"

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, bias: Any = None) -> Any:
        ctx.save_for_backward(x, w)
        ctx.has_bias = bias is not None
        return F.linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x, grad.sum(0) if ctx.has_bias else None


@pytest.fixture(autouse=True)
def _ops(own_ops: None) -> None:
    AddOp(), ReluOp(), LinearOp()


@pytest.fixture
def mesh() -> Any:
    return init_device_mesh(device_type="npu", mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))


ROWS = (Shard(0), R)


def test_the_output_is_a_dtensor(mesh: Any) -> None:
    x, y = (distribute_tensor(torch.randn(8, 16), mesh, ROWS) for _ in range(2))
    result = Add.apply(x, y)
    assert isinstance(result, DTensor)
    assert result.layout == _build_layout(mesh, ROWS, 2)


def test_forward(mesh: Any) -> None:
    a, b = torch.randn(8, 16), torch.randn(8, 16)
    result = Add.apply(distribute_tensor(a, mesh, ROWS), distribute_tensor(b, mesh, ROWS))
    torch.testing.assert_close(result.full_tensor().cpu(), a + b)


def test_layouts_are_remembered(mesh: Any) -> None:
    x, y = (distribute_tensor(torch.randn(8, 16), mesh, ROWS) for _ in range(2))
    op: Any = get_distributed_op("compat add")
    calls = []
    original = op.infer_layout

    def counting(cache_values: Any) -> Any:
        calls.append(cache_values)
        return original(cache_values)

    op.infer_layout = counting  # on the instance
    for _ in range(2):
        Add.apply(x, y)
    assert len(calls) == 1
    Add.apply(*(distribute_tensor(torch.randn(8, 16), mesh, (R, R)) for _ in range(2)))
    assert len(calls) == 2
    with pytest.raises(ValueError, match="no DistributedOp"):
        get_distributed_op("compat nothing")


def test_backward(mesh: Any) -> None:
    x = distribute_tensor(torch.ones(8, 16).requires_grad_(), mesh, ROWS)
    y = distribute_tensor(torch.zeros(8, 16).requires_grad_(), mesh, ROWS)
    local = x.to_local()
    local.retain_grad()
    Add.apply(x, y).to_local().sum().backward()
    assert all(value.eq(1).all() for value in local.grad.local_values())


def test_forward_is_that_of_one_device(mesh: Any) -> None:
    a, b = torch.randn(8, 16), torch.randn(8, 16)
    alone = Add.apply(a, b)
    result = Add.apply(distribute_tensor(a, mesh, ROWS), distribute_tensor(b, mesh, ROWS))
    assert type(alone) is torch.Tensor
    torch.testing.assert_close(result.full_tensor().cpu(), alone)


def test_backward_is_that_of_one_device(mesh: Any) -> None:
    a, b = torch.randn(8, 16).requires_grad_(), torch.randn(8, 16)
    (Add.apply(a, b) * torch.arange(16.0)).sum().backward()
    x = distribute_tensor(a.detach().clone().requires_grad_(), mesh, ROWS)
    y = distribute_tensor(b, mesh, ROWS)
    local = x.to_local()
    local.retain_grad()
    (Add.apply(x, y).to_local() * torch.arange(16.0)).sum().backward()
    assert a.grad is not None
    for number, value in enumerate(local.grad.local_values()):
        torch.testing.assert_close(value, a.grad.chunk(2)[number // 2])


def test_relu(mesh: Any) -> None:
    a = torch.randn(8, 16).requires_grad_()
    a.clamp(min=0).sum().backward()
    x = distribute_tensor(a.detach().clone().requires_grad_(), mesh, ROWS)
    result = Relu.apply(x)
    result.to_local().sum().backward()
    torch.testing.assert_close(result.full_tensor().cpu(), a.detach().clamp(min=0))
    torch.testing.assert_close(x.grad.full_tensor().cpu(), a.grad)


def test_column_parallel_linear(mesh: Any) -> None:
    a, b = torch.randn(8, 16).requires_grad_(), torch.randn(32, 16).requires_grad_()
    F.linear(a, b).sum().backward()
    x = distribute_tensor(a.detach().clone().requires_grad_(), mesh, ROWS)
    w = distribute_tensor(b.detach().clone().requires_grad_(), mesh, (R, R))
    result = Linear.apply(x, w)
    assert result.layout == _build_layout(mesh, ROWS, 2)
    torch.testing.assert_close(result.full_tensor().cpu(), F.linear(a, b), rtol=1e-4, atol=1e-4)
    result.to_local().sum().backward()
    for mine, expected in ((x, a), (w, b)):
        torch.testing.assert_close(mine.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-4)


def test_row_parallel_linear(mesh: Any) -> None:
    a, b, bias = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32)
    x = distribute_tensor(a, mesh, (R, Shard(1)))
    w = distribute_tensor(b, mesh, (R, Shard(1)))
    result = Linear.apply(x, w, bias.to("xla"))
    assert result.placements == (R, Partial())
    reduced = result.reduce_partial().full_tensor().cpu()
    torch.testing.assert_close(reduced, F.linear(a, b, bias), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="same layout"):
        Linear.apply(x, distribute_tensor(b, mesh, (R, R)))


def test_partial_inputs_are_refused(mesh: Any) -> None:
    op: Any = get_distributed_op("compat relu")
    pending = Layout.from_device_mesh(mesh)("None", "None")
    pending.set_partial_by_dev_axis("tp", "sum")
    with pytest.raises(ValueError, match="input 1 is partial"):
        op._check_partial_inputs([None, pending])
    op._check_partial_inputs([_build_layout(mesh, ROWS, 2)])
    total = distribute_tensor(torch.ones(8, 16), mesh, ROWS).sum(0)
    assert total.placements == (Partial(), R)
    with pytest.raises(NotImplementedError, match="partial"):
        Relu.apply(total)


def test_in_a_compiled_step(mesh: Any) -> None:
    a, b = torch.randn(8, 16), torch.randn(32, 16)
    x, w = (distribute_tensor(v, mesh, (R, Shard(1))) for v in (a, b))
    step = xd.compile(lambda x, w: Linear.apply(x, w).reduce_partial())
    expected = F.linear(a, b)
    torch.testing.assert_close(step(x, w).cpu(), expected, rtol=1e-4, atol=1e-4)


# --- shard_module ---------------------------------------------------------------------------------


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        out = torch.matmul(x, self.weight)
        return out if scale is None else out * scale


def test_a_model_by_a_plan() -> None:
    mesh = init_device_mesh("npu", (1, 8), mesh_dim_names=("dp", "tp"))
    plain = Square()
    plan = ShardingPlan(
        plan={"weight": (R, Shard(1))},
        input_plan={"input": (R, R)},
        output_plan={"output": (R, Shard(1))},
    )
    model = shard_module(copy.deepcopy(plain), device_mesh=mesh, sharding_plan=plan)
    assert model.weight.placements == (R, Shard(1))
    data, target = torch.randn(32, 8), torch.randn(32, 8)
    x, y = (DTensor.from_local(v.to("xla"), mesh, (R, R)) for v in (data, target))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]
    for _ in range(2):
        losses = []
        for module, optimizer, inputs, wanted in (
            (plain, optimizers[0], data, target),
            (model, optimizers[1], x, y),
        ):
            out = module(inputs)
            loss = (out - wanted).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert out.placements == (R, Shard(1))
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    torch.testing.assert_close(model.weight.grad.cpu(), plain.weight.grad, rtol=1e-3, atol=1e-3)


def test_plans_by_name_and_of_modules_inside() -> None:
    mesh = init_device_mesh("npu", (2, 4), mesh_dim_names=("dp", "tp"))
    plain = nn.Sequential(Square(), nn.Linear(8, 8))
    plan = ShardingPlan(
        plan={"0.weight": ("None", "tp"), "1.weight": ("tp", "None")},
        input_plan={"0.input": {"x": ("dp", "None"), "scale": None}, "1.input": [("dp", "None")]},
        output_plan={"output": [("None", ("dp", "tp"))]},
        return_local_tensor=[""],
    )
    model = shard_module(copy.deepcopy(plain), mesh, plan)
    data = torch.randn(4, 8)
    seen: list[Any] = []
    model[1].register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    out = model(distribute_tensor(data, mesh, ("None", "None")))
    assert seen[0][0].placements == (Shard(0), R) and out.shape == (4, 1)
    expected = plain(data)
    for number, value in enumerate(out.local_values()):
        torch.testing.assert_close(value, expected[:, number : number + 1])


def test_plans_that_do_not_fit() -> None:
    mesh = init_device_mesh("npu", (8,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(8, 8), mesh, [R])
    for plan, said in (
        (ShardingPlan({"nothing": ("tp", "None")}), "no parameter 'nothing'"),
        (ShardingPlan(input_plan={"inputs": ("tp", "None")}), "must end with 'input'"),
        (ShardingPlan(output_plan={"a.output": ("tp", "None")}), "no module 'a'"),
    ):
        with pytest.raises(ValueError, match=said):
            shard_module(Square(), mesh, plan)
    model = shard_module(Square(), mesh, ShardingPlan(input_plan={"input": [("tp", "None")] * 2}))
    with pytest.raises(ValueError, match="layouts of 2 inputs, and there are 1"):
        model(x)


def test_what_is_refused_by_name() -> None:
    for name in ("RaggedShard", "SkipDTensorDispatch", "PipelineStage"):
        with pytest.raises(ImportError, match="has no counterpart"):
            getattr(hyper_parallel, name)
