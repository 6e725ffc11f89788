import pytest
from tests.conftest import MESHES, make_mesh
from tests.ops import harness, test_ops
@pytest.mark.parametrize("m", list(MESHES))
@pytest.mark.parametrize("case", test_ops.CASES[:40], ids=lambda case: case.name)
def test_op(case, m): harness.check_case(case, make_mesh(m))
