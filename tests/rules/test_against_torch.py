"""The placements that `infer_placements` gives are those that torch's DTensor gives."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

import pytest
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial

from tests.rules.cases import CASES
from tests.rules.torch_truth import Case, layouts, our_arguments, torch_says
from xla_dtensor.rules import infer_placements

Layouts = Sequence[tuple[Placement, ...]]

# Layouts per case: all of them where there are fewer.
SAMPLES = {(2, 4): 40, (8,): 12}

MAY_RAISE = {
    "squeeze": "torch refuses to squeeze a sharded dim of size one",
    "squeeze-all": "torch refuses to squeeze a sharded dim of size one",
    "expand": "torch refuses to expand a sharded dim of size one",
    "unbind": "torch refuses to unbind a sharded dim",
    "cat": "torch may choose a redistribution to partial that it cannot do",
    "convolution": "torch runs its own halo exchange, and only for some layouts",
    "convolution-batch": "torch's convolution has one mesh dim per tensor dim",
}


def _any_partial(inputs: Layouts) -> bool:
    return any(isinstance(p, Partial) for placements in inputs for p in placements)


def _beyond_batch(inputs: Layouts) -> bool:
    return any(p not in (Replicate(), Shard(0)) for p in inputs[0]) or any(
        p != Replicate() for p in inputs[1]
    )


# (the case, the inputs for which it differs, why)
KNOWN_DIFFERENCES: dict[str, tuple[Callable[[Layouts], bool], str]] = {
    "dot": (
        _any_partial,
        "torch reduces a partial operand of dot, though of mm it does not; a product is linear "
        "in each factor, so both keep it",
    ),
    "rms_norm": (
        _any_partial,
        "torch cuts a pending sum over the rows, as of layer_norm; all that comes behind is cut "
        "so, then, and a Llama's step moves 2.1 times the bytes: it is reduced here",
    ),
    "convolution": (
        _beyond_batch,
        "torch lets the result follow the input whatever the weight is, contracted channels "
        "included; ours names the dims (n c, o c -> n o)",
    ),
}


def _comparable(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """`_MaskPartial` carries the mask of its device's local lookup; it is a sum without it."""
    return tuple(Partial() if type(p) is _MaskPartial else p for p in placements)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("mesh_shape", list(SAMPLES), ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_placements_are_torchs(case: Case, mesh_shape: tuple[int, ...], meshes: dict) -> None:
    differs = KNOWN_DIFFERENCES.get(case.name, (lambda inputs: False, ""))[0]
    compared = 0
    logging.disable(logging.CRITICAL)
    try:
        for inputs in layouts(case, len(mesh_shape), SAMPLES[mesh_shape]):
            if differs(inputs):
                continue
            with warnings.catch_warnings():
                # DTensor warns of costly redistributions and of deprecations of its own.
                warnings.simplefilter("ignore")
                truth = torch_says(case, meshes[mesh_shape], inputs)
            if isinstance(truth, Exception):
                assert case.name in MAY_RAISE, truth
                continue
            args, kwargs = our_arguments(case, inputs)
            shapes = [None if r is None else r[0] for r in truth]
            ours = infer_placements(case.func, args, kwargs, shapes, mesh_shape)
            assert ours is not None
            expected = [
                o if r is None else _comparable(r[1]) for r, o in zip(truth, ours, strict=True)
            ]
            assert ours == expected, f"{case.func} of {inputs}"
            compared += 1
    finally:
        logging.disable(logging.NOTSET)
    assert compared or case.name in KNOWN_DIFFERENCES
