"""``x[i]`` and ``x[i] = v`` with an index that differs per device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd

HOST = torch.arange(24.0).reshape(4, 6)


@pytest.fixture
def rank(mesh_2x4: DeviceMesh) -> torch.Tensor:
    """0 to 3, the coordinate along the second mesh dim."""
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("a", "b"))
    return xd.collectives.axis_index(mesh, "b")


def check(actual: Any, expected: Callable[[int], torch.Tensor]) -> None:
    for number, value in enumerate(actual.local_values()):
        torch.testing.assert_close(value, expected(number % 4))


READS: dict[str, Callable[[Any, Any], Any]] = {
    "x[i]": lambda x, i: x[i],
    "x[i, 1:3]": lambda x, i: x[i, 1:3],
    "x[:, i]": lambda x, i: x[:, i],
    "x[..., i]": lambda x, i: x[..., i],
    "x[None, i, None, i]": lambda x, i: x[None, i, None, i],
    "x[-i - 1]": lambda x, i: x[-i - 1],
    "x[i, 2]": lambda x, i: x[i, 2],
    "x[i, [1, 2]]": lambda x, i: x[i, [1, 2]],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_read(read: Callable[[Any, Any], Any], rank: torch.Tensor) -> None:
    check(read(HOST.to("xla"), rank), lambda number: read(HOST, number))


def _set_row(x: Any, i: Any) -> None:
    x[i] = 5.0


def _set_column(x: Any, i: Any) -> None:
    x[1:3, i] = x[1:3, 0].clone()


def _set_one(x: Any, i: Any) -> None:
    x[i, i] = i


def _add_to_last(x: Any, i: Any) -> None:
    x[..., i] = x[..., i] + 1


@pytest.mark.parametrize("write", [_set_row, _set_column, _set_one, _add_to_last])
def test_write(write: Callable[[Any, Any], None], rank: torch.Tensor) -> None:
    x = torch.zeros(4, 6, device="xla") + HOST.to("xla")
    write(x, rank)

    def expected(number: int) -> torch.Tensor:
        value = HOST.clone()
        write(value, number)
        return value

    check(x, expected)


def test_gradient(rank: torch.Tensor) -> None:
    x = HOST.to("xla").requires_grad_()
    (x[rank] ** 2).sum().backward()
    assert x.grad is not None

    def expected(number: int) -> torch.Tensor:
        value = HOST.clone().requires_grad_()
        (value[number] ** 2).sum().backward()
        assert value.grad is not None
        return value.grad

    check(x.grad, expected)


def test_a_write_to_the_copy_raises(rank: torch.Tensor) -> None:
    x = HOST.to("xla")
    for write in (lambda y: y.add_(1), lambda y: y[0].zero_()):
        with pytest.raises(xd.UnsupportedOpError, match=r"write to x\[i\].*x\[i\] = value"):
            write(x[rank])
    x[rank].clone().add_(1)


def test_an_index_of_a_compiled_step(mesh_2x4: DeviceMesh) -> None:
    @xd.compile
    def step(i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = HOST.to("xla")
        y = x[i].clone()
        x[i] = 0
        return y, x

    for number in (2, 3):
        row, x = step(torch.tensor(number).to("xla"))
        expected = HOST.clone()
        expected[number] = 0
        torch.testing.assert_close(row.cpu(), HOST[number])
        torch.testing.assert_close(x.cpu(), expected)
    assert step.compilations == 1
