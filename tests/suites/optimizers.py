"""torch's ``optim_db``: every setting of every optimizer, each way of computing it, eagerly and
compiled, by the comparison of `tests/compilation/test_optim_db.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.optim import LBFGS, SparseAdam

import xla_dtensor as xd
from tests.compilation import test_optim_db as cases_of
from tests.compilation.changes._world import numbers
from tests.conformance.check import Result
from tests.conformance.compare import PASS, WRONG, classify

FORMS = ("eager", "compiled")

Check = Callable[[DeviceMesh, bool], None]


def by_optimizer() -> dict[str, list[tuple[str, Check]]]:
    """What to check by the optimizer's name: with the name of its setting."""
    found: dict[str, list[tuple[str, Check]]] = {}
    for param in cases_of.cases():
        (case,) = param.values
        check = lambda mesh, compiled, case=case: cases_of.test_as_cpu_torch(mesh, compiled, case)
        found.setdefault(case.optimizer.__name__, []).append((param.id, check))
    for info in cases_of.optim_db:
        special = {LBFGS: _lbfgs, SparseAdam: _sparse_adam}.get(info.optim_cls)
        for setting in info.optim_inputs_func(device="cpu") if special else ():
            check = lambda mesh, compiled, run=special, options=setting.kwargs: run(
                mesh, compiled, options
            )
            found.setdefault(info.optim_cls.__name__, []).append((setting.desc, check))
    return found


def check(name: str, cases: list[tuple[str, Check]], mesh: DeviceMesh) -> Result:
    """Three steps of each case: losses, parameters and state."""
    result = Result(name)
    for label, case in cases:
        result.samples += 1
        for form in FORMS:
            try:
                case(mesh, form == "compiled")
                result.note(form, PASS)
            except Exception as error:
                kind = WRONG if isinstance(error, AssertionError) else classify(error)
                result.note(form, kind)
                text = f"{type(error).__name__}: {error}"[:600]
                failure = {"form": form, "class": kind, "sample": result.samples - 1}
                failure |= {"call": label, "layouts": [], "text": text}
                result.failures.append(failure)
    return result


def _lbfgs(mesh: DeviceMesh, compiled: bool, options: dict[str, Any]) -> None:
    """Which takes a closure, and parameters as one vector."""
    expected, actual = cases_of.parameters_on(None), cases_of.parameters_on(mesh)
    for parameters in (expected, actual):
        optimizer = LBFGS(parameters, max_iter=4, **options)
        closure = cases_of.closure_of(optimizer, parameters)
        step = lambda optimizer=optimizer, closure=closure: optimizer.step(closure)
        run = xd.compile(step) if compiled and parameters is actual else step
        for _ in range(2):
            run()
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-3, atol=1e-4)


def _sparse_adam(mesh: DeviceMesh, compiled: bool, options: dict[str, Any]) -> None:
    """Which takes sparse gradients alone."""
    tables = [nn.Parameter(numbers(0, 8, 6)), None]
    tables[1] = nn.Parameter(distribute_tensor(numbers(0, 8, 6), mesh, cases_of.PLACEMENTS[0]))
    rows = torch.tensor([1, 2])
    for table, at in zip(tables, (rows, distribute_tensor(rows, mesh, None)), strict=True):
        optimizer = SparseAdam([table], **options)

        def step(table: Any = table, at: Any = at, optimizer: Any = optimizer) -> None:
            nn.functional.embedding(at, table, sparse=True).sum().backward()
            optimizer.step()

        (xd.compile(step) if compiled and table is tables[1] else step)()
    torch.testing.assert_close(tables[1].detach().cpu(), tables[0].detach())
