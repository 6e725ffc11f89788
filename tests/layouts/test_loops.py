"""Loops over layers (`xd.scan_layers`) move what their layers would one by one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.planning.collectives import collective_traffic

WIDTH, ROWS, ROWS_OF_TABLE = 64, 256, 1024


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.out = (linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = (
            linear(*sizes) for sizes in [(WIDTH, 2 * WIDTH)] * 2 + [(2 * WIDTH, WIDTH)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        heads = (w(h).unflatten(-1, (4, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """With ``cut`` the dim that all mesh dims shard of each weight."""

    def __init__(self, mesh: DeviceMesh | None, cut: dict[str, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS_OF_TABLE, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        if mesh is None:
            return

        def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            dim = cut.get(name.rpartition(".")[2])
            if dim is not None:
                laid_out = distribute_tensor(module.weight.data, mesh, [Shard(dim)] * mesh.ndim)
                module.weight = nn.Parameter(laid_out)

        xd.distribute_module(self, mesh, shard)

    def forward(self, tokens: torch.Tensor, scans: bool) -> torch.Tensor:
        x = self.table(tokens)
        if scans:
            return xd.scan_layers(self.layers, recompute=True)(x)
        for layer in self.layers:
            x = layer(x)
        return x


def step_of(model: Model, scans: bool) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, scans).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


CUTS = {
    "columns": {"table": 1, "q": 1, "v": 1, "out": 0, "gate": 0, "up": 0},
    "rows": {"table": 0, "q": 0, "k": 0, "v": 0, "out": 1, "gate": 0, "up": 0, "down": 1},
}


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", ["8", "2x4", "2x2x2"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_loop_moves_what_its_layers_do(cut: str, name: str) -> None:
    """A table that is cut by its columns gives a stream cut by its features, by its rule. That of
    a loop stayed so, and each product moved it: 4 MB on one axis, for 1.5."""
    mesh = make_mesh(name)
    tokens = torch.randint(ROWS_OF_TABLE, (ROWS, 16))
    placed = distribute_tensor(tokens, mesh, [Shard(0)] * mesh.ndim)
    plain, moved = step_of(Model(None, {}), False), {}
    expected = [plain(tokens) for _ in range(3)]
    for scans in (False, True):
        step = xd.compile(step_of(Model(mesh, CUTS[cut]), scans))
        losses = [step(placed).full_tensor().cpu() for _ in expected]
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        (*_, program) = step.compiled_programs()
        moved[scans] = collective_traffic(program.as_text()).total_bytes
    # The loop's gradients are summed layer by layer, and its weights gathered once more.
    assert moved[True] <= 2 * moved[False]
    weights = sum(p.nbytes for p in Model(None, {}).parameters())
    assert moved[True] < 3 * weights


def test_a_loop_back_gathers_weights_behind_its_barrier() -> None:
    """Before it all were there when the first product began, and none came beside one."""
    mesh = make_mesh("8")
    tokens = distribute_tensor(torch.randint(ROWS_OF_TABLE, (ROWS, 16)), mesh, [Shard(0)])
    text = xd.compile(step_of(Model(mesh, CUTS["rows"]), True)).lower(tokens).as_text()
    (barrier,) = re.finditer(r"stablehlo\.optimization_barrier (%.*) :", text)
    found = []
    for name in barrier[1].split(", "):
        pattern = rf" {name} = sdy\.sharding_constraint %\w+ <@mesh, \[(.*)\]> : tensor<(.*)xf32>"
        layout, shape = re.findall(pattern, text[: barrier.start()])[-1]
        if shape.count("x") == 1:  # a weight
            found.append('"' in layout)  # the name of an axis
    assert found == [True] * 7


class Twice(nn.Module):
    """Two products, twice: both move their weights, which a loop's body does as it takes them."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 512, bias=False), nn.Linear(512, 16, bias=False)
        if mesh is not None:
            for linear, dim in ((self.up, 1), (self.down, 0)):
                laid_out = distribute_tensor(linear.weight.data, mesh, [Shard(0), Shard(dim)])
                linear.weight = nn.Parameter(laid_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.relu(self.up(x)))
        return x + self.down(F.sigmoid(self.up(x)))


@torch.no_grad()
def test_a_layer_moves_its_part_of_a_stack() -> None:
    """One axis goes to another dim of a weight, and the other ceases to cut it. Told where a layer
    wants it, and not from where, XLA gathered all of it; and libtpu the stack of all layers'."""
    mesh, x = make_mesh("2x4"), torch.randn(256, 16)
    layers: dict[bool, nn.ModuleList] = {}
    for is_placed in (False, True):
        torch.manual_seed(0)
        layers[is_placed] = nn.ModuleList(Twice(mesh if is_placed else None) for _ in range(6))
    step = xd.compile(xd.scan_layers(layers[True]))
    got = step(distribute_tensor(x, mesh, [Shard(0), Shard(0)]))
    torch.testing.assert_close(got.full_tensor().cpu(), nn.Sequential(*layers[False])(x))
    (program,) = step.compiled_programs()
    weights = sum(p.nbytes for p in layers[False].parameters())
    assert collective_traffic(program.as_text()).total_bytes <= weights
