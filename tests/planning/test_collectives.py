"""The counting rules, on texts as XLA writes them; the figures are counted by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_dtensor.planning.collectives import collective_traffic, collectives
from xla_dtensor.planning.program_text import HloText

HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=8\n"
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def one(line: str, shape=(2, 4), names=("dp", "tp"), more: str = ""):
    text = f"{HEAD}{ADD}{more}\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n"
    return collectives(text, shape, names)


@pytest.mark.parametrize(
    ("groups", "dims", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("tp",), 4),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("dp",), 2),
        ("replica_groups={}", ("dp", "tp"), 8),
        ("replica_groups=[2,4]<=[8]", ("tp",), 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("dp",), 2),
        ("replica_groups=[1,8]<=[8]", ("dp", "tp"), 8),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ("dp",), 2),
        ("replica_groups=mesh['a'=2,'n'=1,'b'=4] {'b'}", ("tp",), 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", ("dp", "tp"), 8),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", ("tp",), 4),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ("dp",), 2),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", ("tp",), 4),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("dp",), 2),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("dp", "tp"), 4),
    ],
)
def test_along_which_mesh_dims(groups: str, dims: tuple[str, ...], size: int) -> None:
    (found,) = one(f"%r = f32[8]{{0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add")
    assert (found.kind, found.dims, found.size, found.bytes) == ("all-reduce", dims, size, 32)


def test_a_permutation_goes_along_the_dims_of_its_pairs() -> None:
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    (found,) = one(f"%r = bf16[8,2]{{1,0}} collective-permute(%p), channel_id=1, {pairs}")
    assert (found.kind, found.dims, found.size, found.bytes) == (
        "collective-permute",
        ("tp",),
        4,
        32,
    )


@pytest.mark.parametrize(
    ("line", "kind", "bytes_"),
    [
        (
            "%s = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8]",
            "all-gather",
            64,
        ),
        ("%s = f32[8]{0} all-reduce-start(%p), replica_groups=[2,4]<=[8]", "all-reduce", 32),
        (  # jaxlib 0.12
            "%s = ((f32[8]{0}, f32[2]{0}), f32[8]{0}, f32[2]{0}) all-reduce-start(%p, %q), "
            "replica_groups=[2,4]<=[8]",
            "all-reduce",
            40,
        ),
        (
            "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), "
            "source_target_pairs={{0,1}}",
            "collective-permute",
            32,
        ),
        ("%s = f32[2]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8]", "reduce-scatter", 8),
        ("%s = pred[8]{0} all-to-all(%p), replica_groups=[2,4]<=[8]", "all-to-all", 8),
        ("%s = s4[8]{0} all-gather(%p), replica_groups=[2,4]<=[8]", "all-gather", 4),
        (
            "%s = (f32[8]{0:T(256)S(1)}, /*index=1*/bf16[2,2]{1,0:T(8,128)(2,1)}) all-reduce(%p, "
            "%q), replica_groups=[2,4]<=[8]",
            "all-reduce",
            40,
        ),
    ],
)
def test_the_results_count(line: str, kind: str, bytes_: int) -> None:
    (found,) = one(line)
    assert (found.kind, found.bytes) == (kind, bytes_)


def test_what_ends_a_collective_is_none() -> None:
    assert one("%d = f32[16]{0} all-gather-done(%s)") == []
    assert one("%g = f32[8]{0} get-tuple-element(%all-reduce.1), index=0") == []


def test_a_chain_counts_once() -> None:
    """Of the TPU's asynchronous fusions both halves have the collective in them."""
    channel = "channel_id=7, frontend_attributes={chain_id="
    chained = [
        f"""
%async_collective_fusion.{i} (p: f32[4]) -> f32[16] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %g = f32[16]{{0}} all-gather(%p), replica_groups=[2,4]<=[8], {channel}"{chain}"}}
}}
"""
        for i, chain in enumerate((3, 3, 4))
    ]
    lines = [
        f"%f.{i} = f32[16]{{0}} fusion(%p), kind=kOutput, calls=%async_collective_fusion.{i}"
        for i in range(3)
    ]
    found = one("\n  ".join(lines), more="".join(chained))
    # Two chains; that all have one channel says nothing.
    assert [(c.kind, c.times, c.bytes) for c in found] == [("all-gather", 1, 64)] * 2


def test_an_all_reduce_scatter_is_a_reduce_scatter() -> None:
    fused = """
%all-reduce-scatter.1 (p: f32[16]) -> f32[4] {
  %p = f32[16]{0} parameter(0)
  %r = f32[16]{0} all-reduce(%p), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %s = f32[4]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={4}
}
"""
    lines = (
        '%up = f32[16]{0} add(%p, %p), metadata={op_name="jit(f)/nn_backward:up/dot_general"}',
        "%copy.3 = f32[16]{0} copy(%up)",
        "%fusion.59 = f32[4]{0} fusion(%copy.3), kind=kCustom, calls=%all-reduce-scatter.1",
    )
    (found,) = one("\n  ".join(lines), more=fused)
    assert (found.kind, found.bytes) == ("reduce-scatter", 16)
    assert found.parts[0].op_names == ("jit(f)/nn_backward:up/dot_general",)


LOOP = """
%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %u = (s32[], f32[8]{0}) tuple(%i, %r)
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}
"""


def test_a_loops_body_counts_as_often_as_it_runs() -> None:
    line = "%w = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%body"
    known = ', backend_config={"known_trip_count":{"n":"5"}}'
    (found,) = one(line + known, more=LOOP)
    assert (found.times, found.bytes) == (5, 32)
    text = f"{HEAD}{ADD}{LOOP}\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}{known}\n}}\n"
    assert collective_traffic(text).bytes == {"all-reduce": 160}
    unknown = HloText(f"{HEAD}{LOOP}\nENTRY %m (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n")
    assert unknown.unknown_loops == ["w"] and unknown.runs["body"] == 1
    # As the TPU's programs have it: a counter of two parts that is compared with a constant.
    counter = "  %low = u32[] constant(7)\n  %less = pred[] compare(%i, %low), direction=LT\n"
    counted = LOOP.replace("  ROOT %less = pred[] compare(%i, %n), direction=LT\n", counter)
    counted = HloText(f"{HEAD}{counted}\nENTRY %m (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n")
    assert counted.unknown_loops == [] and counted.runs["body"] == 7


def test_a_kernels_attributes_over_several_lines() -> None:
    """As Pallas' splash attention has them: what comes behind belongs to the computation, too."""
    kernel = """  %k = f32[8]{0} custom-call(%p), frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(step)/kernel"}"""
    (found,) = one(f"{kernel}\n  %a = f32[8]{{0}} all-reduce(%k), to_apply=%add")
    assert (found.kind, found.bytes) == ("all-reduce", 32)


def test_parts_of_what_was_brought_together_have_names_of_their_own() -> None:
    lines = (
        '%a = f32[8]{0} add(%p, %p), metadata={op_name="jit(f)/nn_backward:up/mul"}',
        "%b = f32[2]{0} add(%p, %p)",
        "%r = (f32[8]{0}, f32[2]{0}) all-reduce(%a, %b), replica_groups=[2,4]<=[8], "
        'to_apply=%add, metadata={op_name="jit(f)/sum"}',
        '%g = f32[2]{0} get-tuple-element(%r), index=1, metadata={op_name="jit(f)/nn:down/add"}',
    )
    (found,) = one("\n  ".join(lines))
    first, second = found.parts
    assert first.op_names[0] == "jit(f)/nn_backward:up/mul"
    assert second.op_names[0] == "jit(f)/nn:down/add"


def test_against_a_program_that_xla_has_compiled() -> None:
    """A loop of five rounds, each with one sum over tp."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"))

    def body(x):
        def round_(carry, _):
            return jax.lax.psum(carry, "tp") * 0.25, None

        return jax.lax.scan(round_, x, None, length=5)[0]

    spec = jax.sharding.PartitionSpec("dp")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.device_put(np.ones((4, 16), np.float32), jax.sharding.NamedSharding(mesh, spec))
    text = jax.jit(mapped).lower(x).compile().as_text()
    (found,) = collectives(text, (2, 4), ("dp", "tp"))
    assert (found.kind, found.times, found.bytes) == ("all-reduce", 5, 2 * 16 * 4)
    assert (found.dims, found.size) == (("tp",), 4)
    assert jnp.isfinite(jax.jit(mapped)(x)).all()
