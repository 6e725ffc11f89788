"""Recurrent modules and cells, padded and packed, against CPU torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.utils import rnn

import xla_dtensor as xd

MODULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gru": (nn.GRU, {}),
    "gru_without_bias": (nn.GRU, {"bias": False}),
    "gru_both_ways": (nn.GRU, {"bidirectional": True, "num_layers": 2}),
    "lstm": (nn.LSTM, {}),
    "lstm_without_bias": (nn.LSTM, {"bias": False}),
    "lstm_projected": (nn.LSTM, {"proj_size": 2, "bidirectional": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}),
}
CELLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gru": (nn.GRUCell, {}),
    "gru_without_bias": (nn.GRUCell, {"bias": False}),
    "lstm": (nn.LSTMCell, {}),
    "lstm_without_bias": (nn.LSTMCell, {"bias": False}),
    "rnn": (nn.RNNCell, {}),
}
PLACES = ["device", "mesh"]


def twins(kind: Any, options: dict[str, Any], place: str, mesh: DeviceMesh) -> tuple[Any, Any]:
    reference = kind(3, 4, **options)
    model = copy.deepcopy(reference)
    return reference, distribute_module(model, mesh) if place == "mesh" else model.to("xla")


def put(x: torch.Tensor, place: str, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    leaf = x.detach()
    if place == "mesh":
        return distribute_tensor(leaf, mesh, [Shard(dim), Replicate()]).requires_grad_()
    return leaf.to("xla").requires_grad_()


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [t for part in results if part is not None for t in flat(part)]


def compare(ours: Any, theirs: Any, x: Any, reference_x: Any, model: Any, reference: Any) -> None:
    for actual, expected in zip(flat(ours), flat(theirs), strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
    for results in (ours, theirs):
        sum(t.sin().sum() for t in flat(results) if t.is_floating_point()).backward()
    torch.testing.assert_close(x.grad.cpu(), reference_x.grad, rtol=1e-4, atol=1e-5)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.one_in(6)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, place: str, compiled: bool, mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*MODULES[name], place, mesh_2x4)
    x = torch.randn(5, 4, 3, requires_grad=True)
    ours = put(x, place, mesh_2x4, 1)
    results = (xd.compile(model) if compiled else model)(ours)
    compare(results, reference(x), ours, x, model, reference)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CELLS)
def test_cell(name: str, place: str, mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*CELLS[name], place, mesh_2x4)
    x = torch.randn(4, 3, requires_grad=True)
    ours = put(x, place, mesh_2x4, 0)
    compare(model(ours), reference(x), ours, x, model, reference)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_packed(name: str, in_order: bool, batch_first: bool, mesh_2x4: DeviceMesh) -> None:
    kind, options = MODULES[name]
    reference, model = twins(kind, options | {"batch_first": batch_first}, "device", mesh_2x4)
    x = torch.randn(*(4, 5) if batch_first else (5, 4), 3, requires_grad=True)
    lengths = torch.tensor([5, 4, 2, 1] if in_order else [2, 5, 1, 4])
    ours = put(x, "device", mesh_2x4, 0)

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first, enforce_sorted=in_order)
        out, state = model(packed)
        padded, found = rnn.pad_packed_sequence(out, batch_first)
        assert found.tolist() == lengths.tolist()
        return padded, state

    compare(run(model, ours), run(reference, x), ours, x, model, reference)


def test_packing_itself(mesh_2x4: DeviceMesh) -> None:
    x, lengths = torch.arange(24.0).view(4, 3, 2), [4, 2, 1]
    expected = rnn.pack_padded_sequence(x, lengths)
    for ours in (x.to("xla"), distribute_tensor(x, mesh_2x4, [Shard(0), Replicate()])):
        packed = rnn.pack_padded_sequence(ours, lengths)
        assert torch.equal(packed.data.cpu(), expected.data)
        assert torch.equal(packed.batch_sizes, expected.batch_sizes)
        with pytest.raises(RuntimeError, match="5 steps in 4 steps"):
            rnn.pack_padded_sequence(ours, [5, 2, 1])
        for wrong in ([1, 2, 4], [4, 2], [4, 2, 0]):
            with pytest.raises(RuntimeError) as error:
                rnn.pack_padded_sequence(x, wrong)
            with pytest.raises(RuntimeError) as ours_error:
                rnn.pack_padded_sequence(ours, wrong)
            assert str(ours_error.value).splitlines()[0] == str(error.value).splitlines()[0]
