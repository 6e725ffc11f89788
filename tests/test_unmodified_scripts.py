"""Lines of torch programs with the device changed (docs/unmodified_scripts.md) that have no test
where the code is: each as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.nn.utils import parametrizations

import xla_dtensor as xd


def trained(wrap: Any, device: str) -> list[float]:
    torch.manual_seed(0)
    layer = wrap(nn.Linear(4, 4)).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 8).reshape(2, 4).to(device)
    losses = []
    for _ in range(3):
        loss = layer(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "name", ["weight_norm", "spectral_norm", "orthogonal", "old_weight_norm", "old_spectral_norm"]
)
@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
def test_reparametrized_weights(name: str) -> None:
    wrap = {
        "weight_norm": parametrizations.weight_norm,
        "spectral_norm": parametrizations.spectral_norm,
        "orthogonal": parametrizations.orthogonal,
        "old_weight_norm": nn.utils.weight_norm,
        "old_spectral_norm": nn.utils.spectral_norm,
    }[name]
    assert trained(wrap, "xla") == pytest.approx(trained(wrap, "cpu"), rel=1e-4)


@pytest.mark.parametrize("max_norm", [0.5, 1.0])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
def test_embeddings_that_renormalize(max_norm: float, norm_type: float) -> None:
    found = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        layer = nn.Embedding(6, 4, max_norm=max_norm, norm_type=norm_type)
        layer.to(device)
        out = layer(torch.tensor([1, 3, 3]).to(device))
        out.sum().backward()
        found.append([out.detach().cpu(), layer.weight.detach().cpu(), layer.weight.grad.cpu()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)


def test_a_loop_of_inference() -> None:
    model = nn.Linear(3, 2)
    texts = []
    for device in ("cpu", "xla"):
        model.to(device)
        with torch.inference_mode():
            out = model(torch.ones(4, 3, device=device, dtype=torch.float32))
            total = out.sum()
            if total.abs() > 0 and not torch.isnan(total):
                values = total.item(), float(total), int(total * 10), out[0].tolist()
                texts.append(
                    f"{total:.3f} {values[0]:.3f} {values[1]:.3f} {values[2]} {bool(total)}"
                )
                texts[-1] += " ".join(f"{v:.3f}" for v in values[3])
    assert texts[0] == texts[1]


def test_a_tensor_of_a_users_class_is_sharded(mesh_2x4: Any) -> None:
    class Mine(torch.Tensor):
        pass

    value = torch.arange(8.0).as_subclass(Mine)
    x = distribute_tensor(value, mesh_2x4, [Shard(0), Replicate()])
    assert type(x) is xd.XLAShardedTensor
    assert x.full_tensor().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_bincount_in_a_compiled_step_names_what_to_write() -> None:
    x = torch.tensor([1, 1, 3]).to("xla")
    with pytest.raises(xd.DataDependentError, match=r"scatter_add\(0, x, torch\.ones_like\(x\)\)"):
        xd.compile(lambda x: torch.bincount(x, minlength=5))(x)

    @xd.compile
    def counted(x: Any) -> Any:
        zeros = torch.zeros(5, dtype=torch.int64, device=x.device)
        return zeros.scatter_add(0, x, torch.ones_like(x))

    assert counted(x).tolist() == torch.bincount(x.cpu(), minlength=5).tolist()


def test_non_blocking_moves_and_a_progress_line() -> None:
    lines = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(1)
        for step in range(3):
            x = torch.randn(6, 4, generator=generator).to(device, non_blocking=True)
            y = torch.randint(0, 3, (6,), generator=generator).to(device, non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lines.append(f"step {step} loss {loss:.4f} norm {norm:.3f}")
    assert lines[:3] == lines[3:]


def test_local_map_of_tensors_on_meshes_of_two_shapes(mesh_2x4: Any) -> None:
    """Of one root it works; of two, the message says how to make it one."""
    one, other = torch.randn(8, 8), torch.randn(8, 8)
    partial, rows = [Partial(), Partial()], [Shard(0), Shard(1)]
    function = local_map(
        lambda x, y: x.sum() + y.sum(), out_placements=partial, in_placements=(rows, [Shard(0)])
    )
    x = distribute_tensor(one, mesh_2x4, rows)
    flat = mesh_2x4._flatten()
    result = function(x, distribute_tensor(other, flat, [Shard(0)]))
    assert result.full_tensor().item() == pytest.approx((one + other).sum().item(), abs=1e-4)
    root = xd.init_device_mesh("xla", (8,))
    with pytest.raises(xd.MeshMismatchError, match=r"make one mesh of the other .*_flatten"):
        function(x, distribute_tensor(other, root, [Shard(0)]))


def test_the_layout_of_a_sharded_tensor_is_none_for_torchs_cpp(mesh_2x4: Any) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])
    with pytest.raises(TypeError, match=r"layout.* must be torch.layout"):
        torch.zeros(3, layout=x.layout)
    assert torch.zeros(3, device="xla").layout is torch.strided
