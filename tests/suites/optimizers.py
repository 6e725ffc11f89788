"""torch's ``optim_db``: every setting of every optimizer, each way of computing it, eagerly and
compiled, by the comparison of `tests/compilation/test_optim_db.py`."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from tests.compilation import test_optim_db as cases_of
from tests.conformance.check import Result
from tests.conformance.compare import PASS, WRONG, classify

FORMS = ("eager", "compiled")


def by_optimizer() -> dict[str, list[Any]]:
    """The cases (with names) by the optimizer's name."""
    found: dict[str, list[Any]] = {}
    for param in cases_of.cases():
        (case,) = param.values
        found.setdefault(case.optimizer.__name__, []).append((param.id, case))
    return found


def check(name: str, cases: list[Any], mesh: DeviceMesh) -> Result:
    """Three steps of each case, losses, parameters and state."""
    result = Result(name)
    for label, case in cases:
        result.samples += 1
        for form in FORMS:
            try:
                cases_of.test_as_cpu_torch(mesh, form == "compiled", case)
                result.note(form, PASS)
            except Exception as error:
                kind = WRONG if isinstance(error, AssertionError) else classify(error)
                result.note(form, kind)
                text = f"{type(error).__name__}: {error}"[:600]
                failure = {"form": form, "class": kind, "sample": result.samples - 1}
                failure |= {"call": label, "layouts": [], "text": text}
                result.failures.append(failure)
    return result
