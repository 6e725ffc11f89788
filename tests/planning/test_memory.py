"""XLA's refusals as figures: messages that libtpu has given."""

from __future__ import annotations

from xla_dtensor.planning.memory import is_refusal, of_refusal

NEW = RuntimeError(
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (24.00G) exceeds available HBM (15.75G). HLO module: jit__lambda."
    "\nSee https://openxla.org/xla/errors/error_1000 for more details."
)
OLD = RuntimeError(
    """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm.
Used 18.50G of 15.48G hbm. Exceeded hbm capacity by 3.02G.

Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(step)/nn:layers.0/dot_general"
     Shape: bf16[4096,524288]{1,0:T(8,128)(2,1)}
     Unpadded size: 4.00G
     ==========================

  2. Size: 512.0M
     Shape: f32[128,1048576]{1,0:T(8,128)}
     ==========================
"""
)


def test_of_todays_message() -> None:
    assert is_refusal(NEW) and not is_refusal(ValueError("INVALID_ARGUMENT"))
    memory = of_refusal(NEW)
    assert memory is not None and memory.fits is False
    assert (memory.needed, memory.available) == (24 * 2**30, int(15.75 * 2**30))
    assert memory.arguments is None and memory.largest == ()


def test_of_earlier_ones() -> None:
    memory = of_refusal(OLD)
    assert memory is not None
    assert (memory.needed, memory.available) == (int(18.5 * 2**30), int(15.48 * 2**30))
    assert memory.largest == (
        "4.00G bf16[4096,524288]{1,0:T(8,128)(2,1)} jit(step)/nn:layers.0/dot_general",
        "512.0M f32[128,1048576]{1,0:T(8,128)}",
    )


def test_of_others_nothing() -> None:
    assert of_refusal(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 3 bytes")) is None
