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
    "rnn_tanh": (nn.RNN, {"batch_first": True}),
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
    batch = 0 if reference.batch_first else 1
    ours = put(x, place, mesh_2x4, batch)
    results = (xd.compile(model) if compiled else model)(ours)
    if place == "mesh":
        out, *last = flat(results)
        assert out.placements == (Shard(batch), Replicate())
        assert {t.placements for t in last} == {(Shard(1), Replicate())}
    compare(results, reference(x), ours, x, model, reference)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CELLS)
def test_cell(name: str, place: str, mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*CELLS[name], place, mesh_2x4)
    x = torch.randn(4, 3, requires_grad=True)
    ours = put(x, place, mesh_2x4, 0)
    compare(model(ours), reference(x), ours, x, model, reference)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.one_in(4)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("name", ["gru", "gru_both_ways", "lstm_projected", "rnn"])
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


def second_order(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """What the gradient's square has for gradients."""
    loss = sum(t.sin().sum() for t in flat(model(x)))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return list(torch.autograd.grad(grad.square().sum(), [x, *model.parameters()]))


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["gru_both_ways", "lstm_projected", "rnn"])
def test_gradients_of_gradients(name: str, place: str, mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*MODULES[name], place, mesh_2x4)
    x = torch.randn(3, 4, 3, requires_grad=True)
    ours = second_order(model, put(x, place, mesh_2x4, 1))
    for actual, expected in zip(ours, second_order(reference, x), strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["gru", "lstm", "rnn"])
def test_a_graph_of_gradients_of_a_carried_state(name: str, mesh_2x4: DeviceMesh) -> None:
    """What a layer saves has a history that reaches its weights, too."""
    reference, model = twins(*MODULES[name], "device", mesh_2x4)
    x = torch.randn(2, 2, 3, requires_grad=True)

    def gradients(own: nn.Module, x: torch.Tensor) -> Any:
        state, loss = None, torch.zeros((), device=x.device)
        for i in range(3):
            out, state = own(x * (i + 1), state)
            loss = loss + out.square().sum()
        return torch.autograd.grad(loss, [x, *own.parameters()], create_graph=True)

    ours = gradients(model, put(x, "device", mesh_2x4, 0))
    for actual, expected in zip(ours, gradients(reference, x), strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_nans_go_back_through_relus(mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*MODULES["rnn"], "device", mesh_2x4)
    x = torch.randn(2, 2, 3)
    x[0, 0, 0] = torch.nan
    for own in (reference, model):
        own(x.to(own.weight_ih_l0.device))[0].sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, equal_nan=True)


def test_gradients_of_gradients_of_packed_sequences(mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*MODULES["lstm"], "device", mesh_2x4)
    x = torch.randn(5, 3, 3, requires_grad=True)

    class Packed(nn.Module):
        def __init__(self, own: nn.Module) -> None:
            super().__init__()
            self.own = own

        def forward(self, x: torch.Tensor) -> Any:
            out, state = self.own(rnn.pack_padded_sequence(x, [5, 3, 1]))
            return out.data, state

    ours = second_order(Packed(model), put(x, "device", mesh_2x4, 0))
    for actual, expected in zip(ours, second_order(Packed(reference), x), strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gru", "lstm", "rnn"])
def test_programs_are_of_one_size(name: str, mesh_2x4: DeviceMesh) -> None:
    _, model = twins(*MODULES[name], "device", mesh_2x4)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x)[0].square().sum()
        loss.backward()
        return loss.detach()

    compiled = xd.compile(step)
    sizes = {
        len(compiled.lower(torch.ones(steps, 2, 3, device="xla")).as_text().splitlines())
        for steps in (4, 40, 400)
    }
    assert len(sizes) == 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_state_that_is_carried_on(compiled: bool, mesh_2x4: DeviceMesh) -> None:
    """Truncated backpropagation: each part begins with the state of the last."""
    reference, model = twins(*MODULES["lstm"], "device", mesh_2x4)

    def step(model: nn.Module, x: torch.Tensor, state: Any) -> Any:
        out, state = model(x, state)
        out.square().sum().backward()
        return tuple(t.detach() for t in state)

    def ours(x: torch.Tensor, state: Any) -> Any:
        return step(model, x, state)

    run = xd.compile(ours) if compiled else ours
    states = [tuple(torch.zeros(1, 2, 4, device=where) for _ in "hc") for where in ("xla", "cpu")]
    for _ in range(3):
        x = torch.randn(5, 2, 3)
        states = [run(x.to("xla"), states[0]), step(reference, x, states[1])]
    for actual, expected in zip(*states, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-5)


def test_what_is_written_to_and_frozen(mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*MODULES["gru"], "device", mesh_2x4)
    x = torch.randn(3, 2, 3)
    for own in (reference, model):
        own.weight_hh_l0.requires_grad_(False)
        out, last = own(x.to(own.weight_ih_l0.device))
        last.add_(1)  # no view of what each step has
        out.mul_(2).sum().backward()
    assert model.weight_hh_l0.grad is None
    torch.testing.assert_close(model.weight_ih_l0.grad.cpu(), reference.weight_ih_l0.grad)


def test_all_dropped_between_layers(mesh_2x4: DeviceMesh) -> None:
    options = {"num_layers": 2, "dropout": 1.0}
    reference, model = twins(nn.LSTM, options, "device", mesh_2x4)
    x = torch.randn(5, 2, 3)
    for _ in range(2):
        torch.testing.assert_close(model(x.to("xla"))[0].cpu(), reference(x)[0])
        reference.eval(), model.eval()


@pytest.mark.parametrize("name", ["gru", "lstm", "rnn"])
def test_half_precision(name: str, mesh_2x4: DeviceMesh) -> None:
    kind, options = MODULES[name]
    reference = kind(3, 4, **options)
    model = copy.deepcopy(reference).to("xla")
    x = torch.randn(5, 2, 3)
    with torch.autocast("xla"):
        results = flat(model(x.to("xla")))
    assert {t.dtype for t in results} == {torch.bfloat16}
    halves = flat(model.bfloat16()(x.bfloat16().to("xla")))
    for expected, *found in zip(flat(reference(x)), results, halves, strict=True):
        for actual in found:
            torch.testing.assert_close(actual.cpu().float(), expected, rtol=0.05, atol=0.05)
    assert results[0].requires_grad


def test_without_gradients_nothing_is_kept(mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*MODULES["lstm"], "device", mesh_2x4)
    x = torch.randn(5, 2, 3)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            text = xd.compile(model).lower(x.to("xla")).as_text()
            torch.testing.assert_close(model(x.to("xla"))[0].cpu(), reference(x)[0])
        assert "5x2x16" in text  # the input's part of the gates
        assert text.count("stablehlo.dynamic_update_slice") == 1  # of what is stacked, the states


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward AD
def test_transformed(mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*MODULES["gru"], "device", mesh_2x4)
    x = torch.randn(3, 2, 3)

    def along(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda x: model(x)[0], (x,), (torch.ones_like(x),))[1]

    def by_weights(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        def loss(weights: Any) -> torch.Tensor:
            return torch.func.functional_call(model, weights, (x,))[0].square().sum()

        return torch.func.grad(loss)({k: p.detach() for k, p in model.named_parameters()})

    torch.testing.assert_close(along(model, x.to("xla")).cpu(), along(reference, x))
    expected = by_weights(reference, x)
    for name, actual in by_weights(model, x.to("xla")).items():
        torch.testing.assert_close(actual.cpu(), expected[name])


@pytest.mark.parametrize(
    "x, state",
    [
        (torch.zeros(0, 2, 3), None),
        (torch.zeros(5, 2, 3), torch.zeros(1, 3, 4)),
        (torch.zeros(5, 2, 7), None),
        (torch.zeros(5, 2, 3, dtype=torch.int64), None),
    ],
)
def test_torchs_errors(x: torch.Tensor, state: Any, mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*MODULES["gru"], "device", mesh_2x4)
    with pytest.raises((RuntimeError, ValueError)) as error:
        reference(x, state)
    with pytest.raises(error.type) as ours:
        model(x.to("xla"), None if state is None else state.to("xla"))
    assert str(ours.value).splitlines()[0] == str(error.value).splitlines()[0]


def test_a_state_elsewhere_is_refused(mesh_2x4: DeviceMesh) -> None:
    _, model = twins(*MODULES["gru"], "device", mesh_2x4)
    with pytest.raises(RuntimeError, match="not at the same device"):
        model(torch.zeros(5, 2, 3, device="xla"), torch.zeros(1, 2, 4))


def test_checkpointed(mesh_2x4: DeviceMesh) -> None:
    reference, model = twins(*MODULES["lstm"], "device", mesh_2x4)
    x = torch.randn(3, 2, 3)
    for own, given in ((reference, x), (model, x.to("xla"))):
        torch.utils.checkpoint.checkpoint(
            lambda x, own=own: own(x)[0], given, use_reentrant=False
        ).square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-5)
