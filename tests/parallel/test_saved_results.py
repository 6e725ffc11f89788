"""What autograd saves in a forward of ``fully_shard`` is freed where nobody uses the result."""

from __future__ import annotations

import torch
from torch import nn

import xla_dtensor as xd


class _Scores(nn.Module):
    """Computes more than it gives: as flex_attention does, and what saves its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.logsumexp(-1)
        return y.softmax(-1)


def test_a_step_is_traced_once() -> None:
    """A saved result would keep its own node alive, the step would leave it behind, and every call
    would be traced."""
    mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    plain = _Scores()
    model = _Scores().to("xla")
    model.load_state_dict(plain.state_dict())
    xd.fully_shard(model, mesh=mesh, reshard_after_forward=True)
    rows = [torch.randn(2, 8) for _ in range(4)]

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x)[:, :3].square().sum()
        loss.backward()
        return loss.detach()

    own = xd.from_device_values(rows, mesh)
    for _ in range(4):
        losses = step(own).local_values()
    assert step.traces == 1
    expected = plain(torch.cat(rows))[:, :3].square().sum()
    expected.backward()
    torch.testing.assert_close(sum(losses), expected.detach())
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad.full_tensor().cpu()
        torch.testing.assert_close(found, parameter.grad / 4)
