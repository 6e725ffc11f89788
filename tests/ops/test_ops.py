"""Every op that the models and optimizers of the examples use, in the layouts of its inputs,
against CPU torch: values, dtypes, strides, layouts, gradients and the gradients' layouts."""

from __future__ import annotations

import pytest

from tests.conftest import MESHES, make_mesh
from tests.ops import math_cases, module_cases, pointwise_cases, shape_cases
from tests.ops.harness import Case, check_case

pytestmark = pytest.mark.one_in(3)  # each variant compiles programs of its own

CASES = pointwise_cases.CASES + math_cases.CASES + shape_cases.CASES + module_cases.CASES


# Each case runs on one of the two in the main suite, on all meshes in the slow one.
FAST = ("2x4", "2x2x2")
PARAMETERS = [
    pytest.param(
        case, name, id=f"{case.name}-{name}", marks=() if name == FAST[i % 2] else pytest.mark.slow
    )
    for i, case in enumerate(CASES)
    for name in MESHES
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("case", "mesh_name"), PARAMETERS)
def test_op(case: Case, mesh_name: str) -> None:
    check_case(case, make_mesh(mesh_name))


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name", ["8", "2x4", "4x2", "2x2x2"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_op_in_more_layouts(case: Case, mesh_name: str) -> None:
    check_case(case, make_mesh(mesh_name), exhaustive=True)
