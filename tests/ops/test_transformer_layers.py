"""torch's transformer modules in evaluation, where they are one operation each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.parallel.harness import full

X = torch.randn(4, 6, 8)
PADDING = torch.arange(6) >= torch.tensor([6, 4, 5, 2])[:, None]
CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
MASKS = {
    "none": {},
    "padding": {"padding": PADDING},
    "causal": {"mask": CAUSAL},
    "both": {"padding": PADDING, "mask": CAUSAL},
    "float": {"mask": torch.randn(6, 6)},
}


def run(module: nn.Module, kind: str, where: str, mesh: Any, mode: Any, **options: Any) -> Any:
    module = copy.deepcopy(module)
    if where == "sharded":
        xd.distribute_module(module, mesh)

    def place(tensor: torch.Tensor, sharded: bool) -> Any:
        if where == "cpu":
            return tensor
        if where == "device":
            return tensor.to("xla")
        return distribute_tensor(tensor, mesh, [Shard(0) if sharded else Replicate(), Replicate()])

    if where == "device":
        module.to("xla")
    masks = MASKS[kind]
    kwargs = dict(options)
    attends = isinstance(module, nn.MultiheadAttention)
    names = ("key_padding_mask", "attn_mask") if attends else ("src_key_padding_mask", "mask")
    if isinstance(module, nn.TransformerEncoderLayer):
        names = ("src_key_padding_mask", "src_mask")
    if "padding" in masks:
        kwargs[names[0]] = place(masks["padding"], True)
    if "mask" in masks:
        kwargs[names[1]] = place(masks["mask"], False)
    x = place(X, True)
    with mode():
        out = module(x, x, x, **kwargs) if attends else module(x, **kwargs)
    parts = out if isinstance(out, tuple) else (out,)
    return [t if t is None or where == "cpu" else full(t) for t in parts]


def compare(module: nn.Module, kind: str, where: str, mesh: Any, mode: Any, **options: Any) -> None:
    module.eval()
    # CPU torch's one operation takes a mask of numbers for one of booleans.
    torch.backends.mha.set_fastpath_enabled(kind != "float")
    try:
        expected = run(module, kind, "cpu", None, mode, **options)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    found = run(module, kind, where, mesh, mode, **options)
    used = ~PADDING if "padding" in MASKS[kind] else torch.ones(4, 6, dtype=torch.bool)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
        elif other.shape == X.shape:
            # Of what is padding torch itself says nothing: its nested tensors have zeros there.
            torch.testing.assert_close(one[used], other[used], rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ["device", "sharded"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", MASKS)
def test_multi_head_attention(kind: str, mode: Any, where: str, mesh_2x4: Any) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    for options in (
        {"need_weights": False},
        {"need_weights": True},
        {"need_weights": True, "average_attn_weights": False},
    ):
        compare(module, kind, where, mesh_2x4, mode, **options)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("where", ["device", "sharded"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_encoder_layer(
    kind: str, norm_first: bool, activation: str, where: str, mesh_2x4: Any
) -> None:
    module = nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, norm_first=norm_first, activation=activation
    )
    compare(module, kind, where, mesh_2x4, torch.no_grad)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ["device", "sharded"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder(kind: str, where: str, mesh_2x4: Any) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    compare(nn.TransformerEncoder(layer, 2), kind, where, mesh_2x4, torch.inference_mode)


def test_training_and_evaluation_in_turns() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    other = copy.deepcopy(layer).to("xla")
    losses = []
    for module, x in ((layer, X), (other, X.to("xla"))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            module.train()
            loss = module(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            module.eval()
            with torch.no_grad():
                losses.append(module(x).pow(2).mean().item())
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-4)
