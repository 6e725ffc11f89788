"""Errors that happen while a backward pass runs reach the caller as what they were."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from xla_dtensor import UnsupportedOpError
from xla_dtensor.integration.device import registration
from xla_dtensor.plans.ops import SPECIAL


class _Expected(Exception):
    pass


def _fail(grad: torch.Tensor) -> torch.Tensor:
    raise _Expected("from a hook")


def _leaf(mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)] * mesh.ndim).requires_grad_()


@pytest.mark.parametrize("to_cpu", [False, True])
def test_from_a_hook(mesh: DeviceMesh, to_cpu: bool) -> None:
    y = _leaf(mesh) * 2
    y.register_hook(_fail)
    loss = y.sum()
    loss = loss.cpu() if to_cpu else loss
    with pytest.raises(_Expected, match="from a hook"):
        loss.backward()
    x = _leaf(mesh)
    x.sum().backward()  # and the next one works
    assert x.grad is not None


def test_from_an_operation(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    x = _leaf(mesh)
    y = x.sinh().sum()

    def refuse(*_: object) -> object:
        raise UnsupportedOpError("no cosh")

    monkeypatch.setitem(SPECIAL, "aten::cosh.default", refuse)
    with pytest.raises(UnsupportedOpError, match="no cosh"):
        torch.autograd.grad(y, x)


def test_no_stale_error(mesh: DeviceMesh) -> None:
    """An error that the hook itself handles is nobody's."""

    def handle(grad: torch.Tensor) -> None:
        with torch.enable_grad(), pytest.raises(_Expected):
            inner = _leaf(mesh) * 1
            inner.register_hook(_fail)
            inner.sum().backward()

    x = _leaf(mesh)
    y = x * 2
    y.register_hook(handle)
    y.sum().backward()
    assert x.grad is not None


def test_with_an_empty_method_cache(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython's look-up of an attribute forgets the pending exception if it finds the name neither
    in the type's method cache nor in its first dictionary: the guard looks nothing up."""
    asked = registration._DeviceGuard.type_

    def fail(grad: torch.Tensor) -> torch.Tensor:
        # Bytecode that has not been specialised yet, as in a young process.
        young = types.FunctionType(asked.__code__.replace(), asked.__globals__)
        monkeypatch.setattr(registration._DeviceGuard, "type_", young)
        sys._clear_type_cache()
        raise _Expected("from a hook")

    y = _leaf(mesh) * 2
    y.register_hook(fail)
    with pytest.raises(_Expected, match="from a hook"):
        y.sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU of torch's here")
def test_of_another_accelerator() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    with pytest.raises(UnsupportedOpError, match="Move the model to 'xla'"):
        (x * 2).sum().backward()
