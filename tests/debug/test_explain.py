"""What `explain` says of operations. Layouts and bytes are worked out by hand."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.debug import Operation, Transfer
from xla_dtensor.mesh.layout import layout_of
from xla_dtensor.rules import find_rule

R, S, P = Replicate(), Shard, Partial()
HERE = Path(__file__).name


def quiet(function, *args, **kwargs):
    return xd.explain(function, *args, file=io.StringIO(), **kwargs)


def named(explanation, op: str) -> list[Operation]:
    return [each for each in explanation.ops if each.op.removesuffix(".default") == op]


def line_of(where: str) -> str:
    """The source line that ``file:line`` names."""
    file, _, number = where.rpartition(":")
    return Path(file).read_text().splitlines()[int(number) - 1].strip()


def test_a_small_network_forward_and_backward(sharded, mesh_2x4, capsys):
    x = sharded((8, 16), S(0), R)
    up = sharded((32, 16), R, S(0)).requires_grad_()
    down = sharded((16, 32), R, S(1)).requires_grad_()

    def step(x, *, scale):
        hidden = torch.relu(F.linear(x, up))
        out = F.linear(hidden, down).redistribute(placements=[S(0), R])
        loss = out.sum() * scale
        loss.backward()  # the pass
        return loss

    seen = xd.explain(step, x, scale=2.0)
    layout = lambda *placements: layout_of(mesh_2x4, placements, 2)

    first, second, *_ = named(seen, "aten::linear")
    assert first.inputs == (layout(S(0), R), layout(R, S(0)))
    assert first.outputs == (layout(S(0), S(1)),)
    assert first.input_shapes == ((8, 16), (32, 16)) and first.output_shapes == ((8, 32),)
    assert (first.kind, first.rule, first.where) == ("family", "... k, o k, o -> ... o", "matmul")
    assert first.redistributions == () and not first.exchanges
    assert line_of(first.at) == "hidden = torch.relu(F.linear(x, up))"
    assert second.inputs == (layout(S(0), S(1)), layout(R, S(1)))
    assert second.outputs == (layout(S(0), P),)

    # Each device has [4, 16] of float32: 256 bytes, of which 2 * 3 / 4 go around.
    reduction = named(seen, "redistribute")[0]
    (moved,) = reduction.redistributions
    assert (moved.source, moved.target) == (layout(S(0), P), layout(S(0), R))
    assert moved.transfers == (Transfer("all-reduce", "tp", 384),)
    assert moved.kind == "all-reduce over tp" and reduction.moved_bytes == 384
    assert (reduction.kind, reduction.rule) == ("-", "")

    # The weights' gradients are sums over dp, of 512 bytes per device each.
    gradients = [each for each in named(seen, "redistribute") if line_of(each.at).endswith("pass")]
    sums = [m.kind for each in gradients for m in each.redistributions if m.nbytes]
    assert sums == ["all-reduce over dp", "all-reduce over dp"]
    assert seen.moved_bytes == 384 + 512 + 512
    (weight_gradient, _) = named(seen, "xla_dtensor::linear_weight_grad")
    assert line_of(weight_gradient.at) == "loss.backward()  # the pass"

    assert seen.result.item() == pytest.approx(2 * _reference(x, up, down), rel=1e-4)
    printed = capsys.readouterr().out
    assert printed == f"{seen}\n"
    assert f"step: {len(seen)} operations on (dp=2, tp=4), 1.4 KiB moved per device\n" in printed
    assert re.search(
        r"aten::linear +\[dp, tp\], \[None, tp\] -> \[dp, None; sum over tp\] +"
        r'family matmul "\.\.\. k, o k, o -> \.\.\. o"',
        printed,
    )
    assert re.search(
        r"redistribute +\[dp, None; sum over tp\] -> \[dp, None\] +all-reduce over tp, 384 B",
        printed,
    )


def _reference(x, up, down):
    x, up, down = (t.detach().full_tensor().cpu() for t in (x, up, down))
    return (torch.relu(x @ up.T) @ down.T).sum().item()


def test_an_input_that_is_redistributed(sharded, mesh_2x4):
    big, row = sharded((64, 16), R, S(0)), sharded((16,), R, S(0))
    (op,) = quiet(lambda: big + row).ops
    assert (op.op, op.kind, op.where) == ("aten::add.Tensor", "family", "pointwise")
    # The row is gathered: three times the 16 bytes that a device has of it.
    (moved,) = op.redistributions
    assert moved.argument == "other"
    assert (moved.source, moved.target) == (row.layout, layout_of(mesh_2x4, (R, R), 1))
    assert moved.transfers == (Transfer("all-gather", "tp", 48),)
    assert "moves: other [tp] -> [None]: all-gather over tp, 48 B" in str(op)


def test_what_is_written_in_place_goes_back_to_where_it_was(sharded):
    whole, cut = sharded((8, 16), R, R), sharded((8, 16), S(0), R)
    (op,) = quiet(lambda: whole.add_(cut)).ops
    assert op.outputs == (whole.layout,)
    # The sum is made in two halves of 256 bytes, which are gathered.
    assert [(m.argument, m.kind, m.nbytes) for m in op.redistributions] == [
        ("self", "cut over dp", 0),
        ("result", "all-gather over dp", 256),
    ]


def test_factories_read_no_values(sharded):
    partial = sharded((8, 16), R, S(1)) @ sharded((16, 8), R, S(0))
    (op,) = quiet(lambda: torch.zeros_like(partial)).ops
    assert op.moved_bytes == 0 and op.redistributions == ()


@torch.library.custom_op("test_debug::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_rule_of_the_users(sharded, mesh_2x4, scratch):
    x = sharded((8, 16), S(0), R)
    xd.register_rule(twice, "b! h! -> b! h!")
    (op,) = quiet(lambda: twice(x)).ops
    assert (op.op, op.kind, op.rule) == ("test_debug::twice.default", "user", "b! h! -> b! h!")
    assert line_of(op.where) == 'xd.register_rule(twice, "b! h! -> b! h!")'
    assert op.outputs == (layout_of(mesh_2x4, (R, R), 2),)
    assert [(m.argument, m.kind, m.nbytes) for m in op.redistributions] == [
        ("x", "all-gather over dp", 256)
    ]
    assert re.search(rf'rule: user "b! h! -> b! h!" \(.*{HERE}:\d+\)', str(op))


def test_a_rule_that_leaves_a_call_to_the_compiler(sharded, scratch):
    xd.register_rule(twice, lambda call: None)
    (op,) = quiet(lambda: twice(sharded((8, 16), S(0), R))).ops
    assert (op.kind, op.rule) == ("compiler", "")


def test_the_compilers_choice(sharded, mesh_2x4):
    assert find_rule(torch.ops.aten.renorm.default) is None
    x = sharded((8, 16), S(0), R)
    (op,) = quiet(lambda: torch.renorm(x, 2, 0, 1.0)).ops  # a decomposition, of one line
    assert (op.op, op.kind, op.rule_text) == ("aten::renorm.default", "compiler", "compiler")
    assert op.outputs == (x.layout,) and op.redistributions == ()


def test_views_and_values_on_the_host(sharded):
    x = sharded((8, 16), R, S(1))

    def run():
        x.t()
        return (x @ sharded((16, 1), R, S(0))).sum().item()

    t, mm, total, item = quiet(run).ops
    assert (t.op, t.kind) == ("aten::t.default", "view")
    assert mm.rule_text == 'family matmul "m k, k n -> m n"'
    assert [str(each) for each in total.inputs] == ["Layout(dp=2, tp=4; [None, None]; sum over tp)"]
    # The one number is reduced when it is looked at.
    assert (item.op, item.kind, item.rule) == (
        "aten::_local_scalar_dense.default",
        "-",
        "on the host",
    )
    assert [(m.kind, m.nbytes) for m in item.redistributions] == [("all-reduce over tp", 6)]


@pytest.mark.parametrize(
    ("name", "options", "kind", "nbytes"),
    [
        # Each device has [4, 16] of float32: 256 bytes.
        ("all_reduce", {}, "all-reduce", 2 * 3 * 256 // 4),
        ("all_reduce", {"op": "max"}, "all-reduce", 2 * 3 * 256 // 4),
        ("all_gather", {}, "all-gather", 3 * 256),
        ("reduce_scatter", {}, "reduce-scatter", 3 * 256 // 4),
        ("reduce_scatter", {"op": "max"}, "all-to-all", 3 * 256 // 4),
        ("all_to_all", {}, "all-to-all", 3 * 256 // 4),
        ("broadcast", {"src": 1}, "all-reduce", 2 * 3 * 256 // 4),
        ("permute", {"src_dst": [1, 2, 3, 0]}, "permute", 256),
    ],
)
def test_collectives(sharded, mesh_2x4, name, options, kind, nbytes):
    local = sharded((8, 64), S(0), S(1)).to_local()
    collective = getattr(xd.collectives, name)
    seen = quiet(lambda: collective(local, mesh_2x4["tp"], **options))
    (op,) = named(seen, name)
    (moved,) = op.redistributions
    assert moved.transfers == (Transfer(kind, "tp", nbytes),)
    assert op.inputs == ("per-device(dp, tp)",)
    same = name in ("all_reduce", "all_gather", "broadcast")
    assert op.outputs == ("per-device(dp)" if same else "per-device(dp, tp)",)
    assert f"{kind} over tp, {nbytes} B" in str(op)


def test_crossings(sharded, mesh_2x4):
    x = sharded((8, 16), S(0), S(1))

    def run():
        local = x.to_local() + 1
        return DTensor.from_local(local, mesh_2x4, [R, S(1)], run_check=True)

    to_local, add, from_local = quiet(run).ops
    assert (to_local.op, to_local.inputs, to_local.outputs) == (
        "to_local",
        (x.layout,),
        ("per-device(dp, tp)",),
    )
    assert add.inputs == ("per-device(dp, tp)",) and (add.kind, add.rule) == ("-", "")
    # Coordinate 0's [4, 4] for all along dp.
    assert from_local.outputs == (layout_of(mesh_2x4, (R, S(1)), 2),)
    assert [(m.kind, m.nbytes) for m in from_local.redistributions] == [("broadcast over dp", 64)]


class Scale(xd.DFunction):
    _op_name = "debug.Scale"

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, grad * x


def test_a_dfunction(sharded, mesh_2x4, own_ops, capsys):
    xd.DistributedOp("debug.Scale", rule="b h!, h! -> b h!")
    x, w = sharded((8, 16), S(0), S(1)), sharded((16,), R, S(0))
    seen = xd.explain(lambda: Scale.apply(x, w))
    op, *inside = seen.ops
    assert (op.op, op.kind, op.rule) == ("DFunction debug.Scale", "user", "b h!, h! -> b h!")
    assert line_of(op.where) == 'xd.DistributedOp("debug.Scale", rule="b h!, h! -> b h!")'
    assert op.inputs == (x.layout, w.layout)
    assert op.outputs == (layout_of(mesh_2x4, (S(0), R), 2),)
    # [4, 4] and [4] of float32 per device, gathered from four.
    assert [(m.argument, m.kind, m.nbytes) for m in op.redistributions] == [
        ("input 0", "all-gather over tp", 3 * 64),
        ("input 1", "all-gather over tp", 3 * 16),
    ]
    assert [(each.op, each.depth) for each in inside] == [
        ("to_local", 1),
        ("to_local", 1),
        ("aten::mul.Tensor", 1),
        ("from_local", 1),
    ]
    assert op.depth == 0 and inside[2].inputs == ("per-device(dp)", "per-device")
    assert re.search(r"  1  DFunction .*\n.*\n.*\n  2    to_local", capsys.readouterr().out)


def test_a_dfunction_whose_rule_is_a_method(sharded, own_ops):
    class Same(xd.DistributedOp):
        def infer_layout(self, layouts, extra_args=None):
            return layouts[0]

    Same("debug.Scale")
    x, w = sharded((8, 16), S(0), S(1)), sharded((16,), R, S(0))
    op = quiet(lambda: Scale.apply(x, w)).ops[0]
    assert (op.rule, op.outputs) == ("Same.infer_layout", (x.layout,))


def test_a_refused_dfunction_call(sharded, own_ops):
    xd.DistributedOp("debug.Scale", rule="b h, k h -> b h")
    x, w = sharded((8, 16), S(0), S(1)), sharded((16,), R, S(0))
    out = io.StringIO()
    with pytest.raises(xd.LayoutRuleError):
        xd.explain(lambda: Scale.apply(x.relu(), w), file=out)
    assert "1 operation " in out.getvalue() and "aten::relu" in out.getvalue()
    assert quiet(lambda: x.relu()).ops[0].depth == 0


def test_a_jax_function_is_called_by_its_name(sharded):
    def product(a, b):
        return a @ b

    call = xd.jax_function(product, rule="m k, k n -> m n")
    a, b = sharded((8, 16), S(0), R), sharded((16, 8), R, S(1))
    op = quiet(lambda: call(a, b)).ops[-1]
    assert op.op == "xla_dtensor::jax_call product" and op.rule == "m k, k n -> m n"


def test_fully_shard(mesh_2x4):
    layer = torch.nn.Linear(16, 32, bias=False).to("xla")
    xd.fully_shard(layer, mesh=mesh_2x4["dp"])
    x = xd.from_device_values([torch.randn(4, 16) for _ in range(8)], mesh_2x4, ["dp"])
    seen = quiet(lambda: layer(x).sum().backward())
    # [32, 16] of float32, 2048 bytes: gathered for forward, and scattered as a gradient.
    assert {(each.op, each.moved_bytes) for each in seen if "fully_shard" in each.op} == {
        ("fully_shard: gather", 1024),
        ("fully_shard: reduce", 1024),
    }


def test_a_compiled_step_is_explained_while_it_is_traced(sharded, monkeypatch):
    monkeypatch.setattr(xd.config, "audit", 0)  # an audit is a trace, too
    x = sharded((8, 16), R, S(1))
    step = xd.compile(lambda x: torch.relu(x).redistribute(placements=[R, R]))
    seen = quiet(step, x)
    assert [each.op for each in seen] == ["aten::relu.default", "redistribute"]
    assert all(each.traced for each in seen) and seen.moved_bytes == 3 * 128
    assert "Traced for xd.compile" in str(seen)
    again = quiet(step, x)
    assert again.moved_bytes == 0
    assert "nothing was traced. Explain the first\ncall" in str(again)
    assert "aten::" not in str(again)


def test_decompositions_are_parts_of_their_operation(sharded):
    x = sharded((8, 16), S(0), R)
    seen = quiet(lambda: torch.renorm(x, 2, 0, 0.5))  # another number, another executable
    assert [each.op for each in seen] == ["aten::renorm.default"]


def test_tensors_on_the_host_and_no_tensors(sharded):
    x = sharded((4,), R, R)
    (op,) = quiet(lambda: x + torch.ones(4)).ops
    assert op.inputs == (x.layout, "cpu")
    assert str(quiet(lambda: torch.ones(2) + 1)) == "No operation on xla tensors."


def test_many_tensors_are_counted(sharded):
    tensors = [sharded((8,), S(0), R) for _ in range(7)]
    (op,) = quiet(lambda: torch.cat(tensors)).ops
    assert op.layouts_text.startswith("7 x [dp] -> ") and len(op.inputs) == 7


def test_several_meshes(sharded, mesh_2x4):
    x = sharded((8, 16), S(0), R)
    y = DTensor.from_local(x.to_local(), mesh_2x4["dp"], [S(0)])
    text = str(quiet(lambda: (x + 1, y + 1)))
    assert "(dp=2, tp=4) [dp, None] ->" in text and "(dp=2) [dp, None] ->" in text


def test_other_devices(sharded):
    x = sharded((8, 16), S(0), R)
    other = xd.DeviceMesh("xla", [4, 5, 6, 7], mesh_dim_names=("z",))
    (op,) = quiet(lambda: x.redistribute(other, [S(0)])).ops
    assert [(m.kind, m.nbytes) for m in op.redistributions] == [("copy", 128)]


def test_inside_one_another(sharded):
    x = sharded((8, 16), S(0), R)
    inner = []

    def run():
        inner.append(quiet(torch.relu, x))
        return x + 1

    outer = quiet(run)
    assert [each.op for each in inner[0]] == ["aten::relu.default"]
    assert [each.op for each in outer] == ["aten::relu.default", "aten::add.Tensor"]
