"""The rule checker: what compiles to no collective, and that a wrong rule is caught."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import xla_dtensor as xd
from tools.rule_check import (
    Like,
    Report,
    Sample,
    check_call,
    entries,
    exceptions,
    from_schemas,
    samples,
    table,
)
from tools.rule_check.findings import AGREE, DIFFERENT, LESS, MORE, UNNAMED, compare
from tools.rule_check.layouts import claims
from tools.rule_check.programs import compile_call
from xla_dtensor.debug.communication import collectives
from xla_dtensor.rules import Call, Merged, registry, rules
from xla_dtensor.rules.families.pointwise import pointwise_rule
from xla_dtensor.rules.registry import rule_name

aten = torch.ops.aten
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


@pytest.fixture(scope="module")
def mesh_of() -> dict[int, DeviceMesh]:
    """A mesh of one dim, and one of two."""
    shapes = {1: (8,), 2: (2, 4)}
    return {n: xd.init_device_mesh("xla", shape) for n, shape in shapes.items()}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch's meta kernels warn of their own deprecations.
        warnings.simplefilter("ignore", UserWarning)
        yield


def call(func: torch._ops.OpOverload, *args: object, **kwargs: object) -> Sample:
    return Sample(func, args, kwargs)


X, Y, CUBE = Like((16, 8)), Like((16, 8)), Like((8, 16, 8))

# --- the families that never communicate ---------------------------------------------------------

ELEMENTWISE = """
    abs acos add.Tensor addcdiv addcmul bitwise_and.Tensor bitwise_not ceil clamp_min cos
    copysign.Tensor div.Tensor elu eq.Tensor erf exp expm1 floor fmod.Tensor ge.Tensor gelu
    hardsigmoid hardswish hardtanh isfinite leaky_relu lerp.Tensor lgamma log log1p logaddexp
    logical_and logical_not lt.Scalar maximum mish mul.Scalar mul.Tensor nan_to_num ne.Scalar neg
    pow.Tensor_Scalar pow.Tensor_Tensor reciprocal relu remainder.Tensor round rsqrt sgn
    sigmoid sign silu sin softplus sqrt square sub.Tensor tan tanh threshold_backward trunc
    gelu_backward sigmoid_backward tanh_backward xlogy.Tensor gcd igamma special_zeta
    special_legendre_polynomial_p
"""
BY_NAME = {str(sample.func).removeprefix("aten."): sample for sample in from_schemas()}
SAME_LAYOUT: list[tuple[Placement, ...]] = [(S0,), (S1,), (S0, S1), (S1, S1)]

OF_MIXED_TENSORS = [
    (call(aten.where.self, Like((16, 8), torch.bool), X, Y), (S0, S1)),
    (call(aten.masked_fill.Scalar, X, Like((16, 8), torch.bool), 0.0), (S1, S0)),
    (call(aten._to_copy.default, X, dtype=torch.bfloat16), (S0, S0)),
    (call(aten.clone.default, X), (S0, S1)),
    (call(aten.native_dropout_backward.default, X, Like((16, 8), torch.bool), 2.0), (S0,)),
    (call(aten.zeros_like.default, X), (S0, S1)),
]

VIEWS = [
    (call(aten.view.default, CUBE, [128, 8]), (S0, S0)),
    (call(aten.view.default, CUBE, [8, 128]), (S0, R)),
    (call(aten.view.default, CUBE, [8, 4, 4, 8]), (S0, S2)),
    (call(aten.reshape.default, CUBE, [128, 8]), (S2, S2)),
    (call(aten._unsafe_view.default, Like((128, 8)), [8, 16, 8]), (S1,)),
    (call(aten.view.default, Like((64, 8)), [8, 8, 8]), (S0, S1)),
    (call(aten.permute.default, CUBE, [2, 0, 1]), (S0, S1)),
    (call(aten.transpose.int, CUBE, 0, 2), (S0, S2)),
    (call(aten.t.default, X), (S0, S1)),
    (call(aten.unsqueeze.default, X, 1), (S0, S1)),
    (call(aten.squeeze.dim, Like((16, 1, 8)), 1), (S0, S2)),
    (call(aten.expand.default, Like((16, 1)), [16, 8]), (S0,)),
    (call(aten.expand.default, X, [4, 16, 8]), (S0, S1)),
    (call(aten.select.int, CUBE, 1, 3), (S0, S2)),
    (call(aten.slice.Tensor, CUBE, 1, 2, 6), (S0, S2)),
    (call(aten.split.Tensor, CUBE, 4, 1), (S0, S2)),
    (call(aten.unbind.int, CUBE, 1), (S2, S0)),
    (call(aten.diagonal.default, CUBE, 0, 1, 2), (S0,)),
    (call(aten.unfold.default, CUBE, 1, 4, 2), (S0, S2)),
    (call(aten.view_as_real.default, Like((16, 8), torch.complex64)), (S0, S1)),
    (call(aten.real.default, Like((16, 8), torch.complex64)), (S0, S1)),
]

SOFTMAX = [
    (call(aten._softmax.default, CUBE, 2, False), (S0, S1)),
    (call(aten._softmax.default, CUBE, 0, False), (S1, S1)),
    (call(aten._log_softmax.default, CUBE, 1, False), (S2, S0)),
    (call(aten._log_softmax.default, X, 1, False), (S0,)),
    (call(aten._safe_softmax.default, X, 1), (S0, S0)),
    (call(aten.softmax.int, X, 0), (S1,)),
    (call(aten._softmax_backward_data.default, CUBE, CUBE, 2, torch.float32), (S0, S1)),
    (call(aten._log_softmax_backward_data.default, X, Y, 1, torch.float32), (S0,)),
    (call(aten.logsumexp.default, X, [1]), (S0,)),
]

B = Like((8, 16, 8))
HEADS = Like((8, 8, 16, 8))
BATCHED = [
    (call(aten.bmm.default, B, Like((8, 8, 32))), (S0,)),
    (call(aten.bmm.default, B, Like((8, 8, 32))), (S0, S0)),
    (call(aten.bmm.default, B, Like((8, 8, 32))), (R, S0)),
    (call(aten.baddbmm.default, Like((8, 16, 32)), B, Like((8, 8, 32))), (S0, S0)),
    (call(aten.matmul.default, HEADS, Like((8, 8, 8, 32))), (S0, S1)),
    (call(aten.matmul.default, HEADS, Like((8, 8, 8, 32))), (S1,)),
    (call(aten.einsum.default, "bij,bjk->bik", [B, Like((8, 8, 32))]), (S0,)),
    (call(aten.cdist.default, B, Like((8, 32, 8))), (S0,)),
    (call(aten.scaled_dot_product_attention.default, HEADS, HEADS, HEADS), (S0, S1)),
]


def _no_collectives(sample: Sample, layout: tuple[Placement, ...], mesh: DeviceMesh) -> None:
    whole = (R,) * len(layout)
    inputs = [layout if like.shape else whole for like in sample.likes]
    compiled = compile_call(sample, inputs, mesh)
    assert not compiled.collectives, f"{sample} of {layout}: {dict(compiled.collectives)}"
    # And no shard was given up for it.
    for placements in compiled.claimed:
        assert [isinstance(p, Shard) for p in placements] == [p != R for p in layout]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ELEMENTWISE.split())
def test_elementwise_is_silent(name: str, mesh_of: dict[int, DeviceMesh]) -> None:
    sample = BY_NAME[name if "." in name else f"{name}.default"]
    for layout in SAME_LAYOUT:
        _no_collectives(sample, layout, mesh_of[len(layout)])


@pytest.mark.parametrize(
    ("sample", "layout"), [*OF_MIXED_TENSORS, *VIEWS, *SOFTMAX, *BATCHED], ids=str
)
def test_family_is_silent(
    sample: Sample, layout: tuple[Placement, ...], mesh_of: dict[int, DeviceMesh]
) -> None:
    _no_collectives(sample, layout, mesh_of[len(layout)])


# --- the checker itself --------------------------------------------------------------------------

SUBSET = """
    add.Tensor amax avg_pool2d bmm cat convolution cumsum embedding gather layer_norm
    linalg_inv_ex mm mse_loss native_group_norm nll_loss_forward pad select.int sort.stable
    split.Tensor sum.dim_IntList where.self xla_dtensor::attention_backward
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SUBSET.split())
def test_a_rule_of_each_family_holds(name: str, mesh_of: dict[int, DeviceMesh]) -> None:
    wanted = entries.s(name).func
    sample = next(s for s in samples() if s.func is wanted)
    checked = check_call(sample, list(mesh_of.values()), free=2, moving=1)
    assert checked.findings, checked.reason
    wrong = [f"{f}: {f.violation}" for f in checked.findings if f.violation and not f.allowed]
    assert not wrong


@contextmanager
def rule_of(func: torch._ops.OpOverload, rule: Callable[[Call], Merged | None]) -> Iterator[None]:
    """A rule in place of the family's own, which comes back."""
    name = rule_name(func)
    assert name is not None
    own = registry._RULES[name]
    registry._RULES[name] = rule
    registry.changes.tell()
    try:
        yield
    finally:
        registry._RULES[name] = own
        registry.changes.tell()


def as_its_input(call: Call) -> Merged:
    same = call.tensors[0].placements
    return Merged((same,), (same,))


def test_wrong_claim_of_no_communication_is_caught(mesh_of: dict[int, DeviceMesh]) -> None:
    # That a scan needs no other shard's values.
    with rule_of(aten.cumsum.default, pointwise_rule):
        checked = check_call(call(aten.cumsum.default, X, 0), list(mesh_of.values()), 8, 0)
    wrong = [f for f in checked.findings if f.violation]
    assert wrong
    assert all(S0 in f.inputs[0] and not f.allowed for f in wrong)
    assert "claims no communication" in wrong[0].violation
    assert Report([checked]).violations == wrong


def test_wrong_layout_is_caught(mesh_of: dict[int, DeviceMesh]) -> None:
    # That a permuted tensor's dims are sharded as they were before.
    sample = call(aten.permute_copy.default, CUBE, [2, 0, 1])
    with rule_of(aten.permute.default, as_its_input):
        checked = check_call(sample, list(mesh_of.values()), 8, 0)
    assert checked.findings
    assert all(f.layouts == (DIFFERENT,) for f in checked.findings)
    assert all("all-to-all" in f.violation for f in checked.findings)
    assert Report([checked]).violations == checked.findings
    own = check_call(sample, list(mesh_of.values()), 8, 0)
    assert {f.layouts for f in own.findings} == {(AGREE,)}
    assert not Report([own]).violations


def test_right_rule_is_not(mesh_of: dict[int, DeviceMesh]) -> None:
    checked = check_call(call(aten.cumsum.default, X, 0), list(mesh_of.values()), 8, 2)
    assert [f.violation for f in checked.findings] == [""] * len(checked.findings)
    moving = [f for f in checked.findings if f.moves]
    assert moving
    assert all(f.collectives for f in moving)


def test_result_of_all_shards_is_a_claim_to_communicate() -> None:
    found = {c.inputs: c.moves for c in claims(call(aten.sum.dim_IntList, X, [0]), (8,), 9, 9)}
    assert found[((S0,),)] == "a result of all shards is on every device"
    assert found[((S1,),)] == ""


def test_a_rule_may_say_that_shards_exchange() -> None:
    def exchanging(call: Call) -> Merged:
        return replace(as_its_input(call), exchanges=True)

    with rule_of(aten.cumsum.default, exchanging):
        found = claims(call(aten.cumsum.default, X, 0), (8,), 9, 9)
    assert found
    assert {c.moves for c in found} == {"the rule says that shards need values of each other"}


def test_written_arguments_count_as_results() -> None:
    # The gradient is sharded, the parameter it is added to is not.
    found = {c.inputs: c.moves for c in claims(call(aten.add_.Tensor, X, Y), (8,), 99, 99)}
    assert found[((R,), (S0,))] == "a result of all shards is on every device"
    assert found[((S0,), (R,))] == ""


@pytest.mark.parametrize(
    ("claimed", "chosen", "expected"),
    [
        ((S0, R), (S0, R), AGREE),
        ((S0, Partial()), (S0, R), AGREE),
        ((R, R), (S0, R), LESS),
        ((S0, S1), (R, S1), MORE),
        ((S0, R), (S1, R), DIFFERENT),
        ((S0, R), (R, S0), DIFFERENT),
        ((S0, R), None, UNNAMED),
    ],
)
def test_compare(claimed: tuple, chosen: tuple | None, expected: str) -> None:
    assert compare(claimed, chosen) == expected


def test_collectives_are_counted() -> None:
    text = """
      %all-gather.1 = f32[16,8]{1,0} all-gather(%param.1), dimensions={0}
      %add = f32[16,8]{1,0} add(%all-gather.1, %all-gather.1), metadata={op_name="all_gather("}
      %start = (f32[2], f32[16]) all-reduce-start(%add), to_apply=%sum
      ROOT %done = f32[16] all-reduce-done(%start)
    """
    assert collectives(text) == {"all-gather": 1, "all-reduce": 1}


def test_every_rule_has_a_call_or_a_reason() -> None:
    called = {sample.rule for sample in (*samples(), *from_schemas())}
    without = set(rules()) - called - set(table.NOT_CHECKED)
    assert not without
    assert not called & set(table.NOT_CHECKED)


def test_exceptions_are_of_ops_that_have_calls() -> None:
    called = {s.func._schema.name.removesuffix("_") for s in (*samples(), *from_schemas())}
    assert set(exceptions.ALLOWED) <= called


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with `arguments`, in a process of its own."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    names = ("--names", "relu,scatter_add", "--mesh", "2x2", "--layouts", "2", "--json", str(out))
    done = run("-m", "tools.rule_check", *names)
    assert done.returncode == 0, done.stderr
    assert "0 wrong" in done.stdout
    found = json.loads(out.read_text())
    assert found["rules"]["aten::scatter_add"]["silent"] > 0
    assert not found["violations"]
    # An accepted one is not hidden.
    assert all(f["reason"] == exceptions.ALLOWED[f["rule"]].reason for f in found["allowed"])
    assert found["allowed"]


@pytest.mark.slow
def test_command_fails_with_a_wrong_rule() -> None:
    done = run(
        *("-c", COMMAND_WITH_A_WRONG_RULE),
        *("--names", "cumsum", "--mesh", "2", "--layouts", "2"),
    )
    assert done.returncode == 1, done.stderr
    assert "WRONG: aten::cumsum" in done.stdout


COMMAND_WITH_A_WRONG_RULE = """
import sys
from xla_dtensor.rules import register_rule
from tools.rule_check.__main__ import main
from xla_dtensor.rules.families.pointwise import pointwise_rule

register_rule("aten::cumsum", pointwise_rule, override=True)
sys.exit(main())
"""


@pytest.mark.slow
def test_command_fails_without_a_call() -> None:
    done = run("-m", "tools.rule_check", "--names", "no_such_op")
    assert done.returncode == 2
    assert "no_such_op" in done.stderr
