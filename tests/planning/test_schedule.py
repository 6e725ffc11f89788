"""Schedules, of programs as XLA writes them and of a chip whose figures are easily counted with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from xla_dtensor.planning.collectives import collectives
from xla_dtensor.planning.host_copies import host_copies
from xla_dtensor.planning.program_text import HloText
from xla_dtensor.planning.schedule import Schedule, schedule
from xla_dtensor.runtime.chips import Chip

# A million operations and a million bytes each take a second.
# So do a thousand bytes between it and its host.
CHIP = Chip("slow", 1e6, 1e9, 1e6, 1.0, 1, "", (("tf32", 0.5e6), ("fp32", 0.25e6)), host=1e3)


@dataclass
class Takes:
    """Links over which each collective takes so long."""

    took: float

    def seconds(self, collective: Any) -> float:
        return self.took


ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
GROUPS = "channel_id=1, replica_groups={{0,1}}"
# 100 x 100 x 50 terms: 1e6 operations, a second.
DOT = "dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
X, Y = "%x = bf16[100,50] parameter(0)", "%y = bf16[50,100] parameter(1)"


def of(lines: list[str], took: float, more: str = "") -> Schedule:
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule m, is_scheduled=true\n{ADD}{more}\nENTRY %main (p: f32[8]) -> f32[8] {{\n"
    text += f"{body}\n}}\n"
    program = HloText(text)
    moved = collectives(program, (2,), ("dp",))
    return schedule(program, moved, Takes(took), CHIP, host_copies(program))


def test_what_stands_between_start_and_done_hides_it() -> None:
    lines = [
        *(X, Y, "%z = f32[2] parameter(2)"),
        f"%s = f32[2] all-reduce-start(%z), {GROUPS}, to_apply=%add",
        f"%one = bf16[100,100] {DOT}",
        "%e = f32[2] all-reduce-done(%s)",
        f"%two = bf16[100,100] {DOT}",
    ]
    short, long = of(lines, 0.5), of(lines, 1.75)
    assert (short.seconds, short.exposed) == (pytest.approx(2), {"s": 0})
    assert (long.seconds, long.exposed) == (pytest.approx(2.75), {"s": pytest.approx(0.75)})
    (stretch,) = long.stretches
    kinds = [
        (event.what, round(event.start, 3), round(event.seconds, 3)) for event in stretch.events
    ]
    assert kinds == [("compute", 0, 1), ("all-reduce", 0, 1.75), ("compute", 1.75, 1)]


def test_what_is_in_one_piece_is_waited_for() -> None:
    lines = [X, Y, f"%one = bf16[100,100] {DOT}", "%z = f32[2] parameter(2)"]
    lines += [f"%r = f32[2] all-reduce(%z), {GROUPS}, to_apply=%add"]
    found = of(lines, 3)
    assert (found.seconds, found.exposed) == (pytest.approx(4), {"r": 3})


def test_collectives_run_one_after_another() -> None:
    lines = [
        *(X, Y, "%z = f32[2] parameter(2)"),
        f"%s = f32[2] all-reduce-start(%z), {GROUPS}, to_apply=%add",
        f"%t = f32[2] all-reduce-start(%z), {GROUPS}, to_apply=%add",
        f"%one = bf16[100,100] {DOT}",
        "%e = f32[2] all-reduce-done(%s)",
        "%f = f32[2] all-reduce-done(%t)",
    ]
    found = of(lines, 0.75)
    assert found.seconds == pytest.approx(1.5)
    assert found.exposed == {"s": 0, "t": pytest.approx(0.5)}


# As XLA's compilers write copies to the host and from there, S(5): a TPU's, of a slice, and a GPU's
# in a fusion.
OF_SLICES = [
    *(X, Y, '%h = f32[4,250]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"'),
    *("%v = f32[1,250]{1,0} parameter(2)", "%i = s32[] constant(0)"),
    "%s = ((f32[4,250]{1,0:S(5)}, f32[1,250]{1,0}, s32[], s32[]), f32[4,250]{1,0:S(5)}, u32[]) "
    "dynamic-update-slice-start(%h, %v, %i, %i)",
    f"%one = bf16[100,100] {DOT}",
    "%e = f32[4,250]{1,0:S(5)} dynamic-update-slice-done(%s)",
    "%t = ((f32[4,250]{1,0:S(5)}, s32[], s32[]), f32[1,250]{1,0}, u32[]) "
    "fusion-start(%e, %i, %i), kind=kCustom, calls=%sliced",
    "%f = f32[1,250]{1,0} fusion-done(%t)",
]
SLICED = """
%sliced (p: f32[4,250], i: s32[], j: s32[]) -> f32[1,250] {
  %p = f32[4,250]{1,0:S(5)} parameter(0)
  %j1 = s32[] parameter(1)
  %j2 = s32[] parameter(2)
  ROOT %d = f32[1,250]{1,0} dynamic-slice(%p, %j1, %j2), dynamic_slice_sizes={1,250}
}
"""


def test_copies_to_the_host_and_from_there() -> None:
    """A slice of 1000 bytes goes there behind a product, and comes back while nothing runs."""
    found = of(OF_SLICES, 0, SLICED)
    assert found.seconds == pytest.approx(2, rel=1e-2)
    assert found.exposed == {"s": pytest.approx(0, abs=1e-2), "t": pytest.approx(1)}
    (stretch,) = found.stretches
    assert [e.dims for e in stretch.events if e.what == "copy"] == [("host",), ("host",)]


def test_a_copy_in_one_piece_is_waited_for() -> None:
    """And what has another memory of the chip's at one end isn't one to the host."""
    lines = [X, Y, "%z = f32[250] parameter(2)", f"%one = bf16[100,100] {DOT}"]
    lines += ["%c = f32[250]{0:S(5)} copy(%z)", "%n = f32[250]{0:S(1)} copy(%z)"]
    found = of(lines, 0)
    assert found.exposed == {"c": pytest.approx(1)} and found.seconds == pytest.approx(2, rel=1e-2)


LOOP = f"""
%body (p: f32[2]) -> f32[2] {{
  %z = f32[2] parameter(0)
  ROOT %r = f32[2] all-reduce(%z), {GROUPS}, to_apply=%add
}}

%condition (p: f32[2]) -> pred[] {{
  %z2 = f32[2] parameter(0)
  ROOT %c = pred[] constant(true)
}}
"""


def test_a_loop_waits_in_each_round() -> None:
    trips = 'backend_config={"known_trip_count":{"n":"4"}}'
    lines = [
        "%z3 = f32[2] parameter(0)",
        f"ROOT %w = f32[2] while(%z3), condition=%condition, body=%body, {trips}",
    ]
    found = of(lines, 3, LOOP)
    assert found.seconds == pytest.approx(12) and found.exposed == {"r": 12}


CHAIN = """
%begun (p: f32[2]) -> f32[2] {
  %z = f32[2] parameter(0)
  ROOT %g = f32[2] all-gather(%z), replica_groups={{0,1}}, dimensions={0}, chain_id="7"
}

%ended (p: f32[2]) -> f32[2] {
  %z2 = f32[2] parameter(0)
  ROOT %h = f32[2] all-gather(%z2), replica_groups={{0,1}}, dimensions={0}, chain_id="7"
}
"""


def test_the_tpus_fusions_that_start_and_end_one() -> None:
    lines = [
        *(X, Y, "%z3 = f32[2] parameter(2)"),
        "%async-collective-start = f32[2] fusion(%z3), kind=kCustom, calls=%begun",
        f"%one = bf16[100,100] {DOT}",
        "%async-collective-done = f32[2] fusion(%async-collective-start), calls=%ended",
    ]
    found = of(lines, 1.25, CHAIN)
    assert found.exposed == {"g": pytest.approx(0.25)}
    assert found.seconds == pytest.approx(1.25)


FUSED = """
%slices (p: f32[1000,100], i: s32[]) -> f32[1,100] {
  %p = f32[1000,100] parameter(0)
  %i = s32[] parameter(1)
  ROOT %d = f32[1,100] dynamic-slice(%p, %i), dynamic_slice_sizes={1,100}
}

%writes (p: f32[1000,100], u: f32[1,100], i: s32[]) -> f32[1000,100] {
  %p2 = f32[1000,100] parameter(0)
  %u = f32[1,100] parameter(1)
  %i2 = s32[] parameter(2)
  ROOT %d2 = f32[1000,100] dynamic-update-slice(%p2, %u, %i2)
}

%product (l: f32[10,50], r: f32[50,10]) -> f32[10,10] {
  %l = f32[10,50] parameter(0)
  %r2 = f32[50,10] parameter(1)
  ROOT %dot = f32[10,10] dot(%l, %r2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        # A row and a number are read, and a row is written.
        ("%f = f32[1,100] fusion(%big, %n), calls=%slices", 804e-6),
        ("%f = f32[1000,100] fusion(%big, %row, %n), calls=%writes", 804e-6),
        ("%f = f32[1000,100] negate(%big)", 0.8),
        # 10 x 10 x 50 terms in float32, half as fast as in bfloat16.
        ("%f = f32[10,10] fusion(%l3, %r3), calls=%product", 0.02),
        (
            "%f = f32[10,10] dot(%l3, %r3), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
            "operand_precision={highest,highest}",
            0.04,
        ),
        ("%f = f32[1000,100] bitcast(%big)", 0.0),
        (  # the memory that a library works in is none that it writes
            "%f = (c64[10,10], s8[33554432]) custom-call(%c3, %d3), "
            'custom_call_target="__cublas$lt$matmul"',
            8 * 10 * 10 * 5 * 4e-6,
        ),
        (
            '%f = bf16[1,2,8,4] custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", '
            'backend_config={"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": '
            '["1", "2", "8", "8"]}, "mask_type": "CAUSAL"}',
            2 * 2 * 2 * 36 * 4e-6,  # two products of two heads, of 36 pairs
        ),
        *(  # the kernels of attention on TPUs, of which a causal mask leaves 0.625
            (
                "%f = bf16[1,2,8,4] custom-call(%n, %n, %q, %q, %q), "
                'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
                '"xprof_metadata":"{}"\n}}, '
                'metadata={op_name="jit(step)/transpose(jvp(jit(splash_attention_of_0.625)))/'
                f'vmap({kernel})/pallas_call" stack_frame_id=7}}',
                products * 2 * 2 * 64 * 0.625 * 4e-6,
            )
            for kernel, products in (
                ("splash_mha_fwd_residuals", 2),
                ("splash_mha_dq_no_residuals", 3),
                ("splash_mha_dkv_no_residuals", 4),
            )
        ),
        (  # a product of groups, which says it
            '%f = f32[10,10] custom-call(%n, %l3, %r3), custom_call_target="tpu_custom_call", '
            'backend_config={"custom_call_config":{"body":"TUz=","cost_estimate":{"flops":"40000",'
            '"transcendentals":"0"}}}',
            40000 / 0.5e6,
        ),
    ],
)
def test_how_long_an_instruction_takes(line: str, seconds: float) -> None:
    given = [
        *("%big = f32[1000,100] parameter(0)", "%n = s32[] parameter(1)"),
        *("%row = f32[1,100] parameter(2)", "%l3 = f32[10,50] parameter(3)"),
        *("%c3 = c64[10,5] parameter(6)", "%d3 = c64[5,10] parameter(7)"),
        *("%r3 = f32[50,10] parameter(4)", "%q = bf16[1,2,8,4] parameter(5)"),
    ]
    assert of([*given, line], 1, FUSED).seconds == pytest.approx(seconds)
