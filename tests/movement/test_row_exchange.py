"""Rows to the devices that their values name, in static buffers, against plain Python."""

from __future__ import annotations

import pytest
import torch

import xla_dtensor as xd
from xla_dtensor import row_exchange

DEVICES, KINDS, ROWS, WIDTH = 4, 3, 10, 5

# Which kind (of all devices' kinds) each row of each device is.
DRAWN = torch.randint(DEVICES * KINDS, (DEVICES, ROWS), generator=torch.Generator().manual_seed(0))
ALL_TO_ONE = torch.full((DEVICES, ROWS), 4)
NONE_FOR_SOME = DRAWN % KINDS + KINDS * torch.arange(DEVICES).unsqueeze(1) // 2 * 2
CASES = {"drawn": DRAWN, "all to one": ALL_TO_ONE, "none for some": NONE_FOR_SOME}


def expected(
    rows: list[torch.Tensor], counts: torch.Tensor, slots: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What each device gets, by kind and then by sender, and which of its own rows went."""
    got: list[list[list[torch.Tensor]]] = [[[] for _ in range(KINDS)] for _ in rows]
    went = [torch.zeros(len(own), dtype=torch.bool) for own in rows]
    for sender, own in enumerate(rows):
        at = 0
        for receiver in range(DEVICES):
            sent = 0
            for kind in range(KINDS):
                for _ in range(int(counts[sender, receiver * KINDS + kind])):
                    if sent < slots:
                        got[receiver][kind].append(own[at])
                        went[sender][at] = True
                    sent, at = sent + 1, at + 1
    empty = rows[0].new_empty((0, WIDTH))
    return [torch.stack([x for kind in of for x in kind]) if any(of) else empty for of in got], went


@pytest.mark.one_in(8)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("capacity", [None, 1.25], ids=["room for all", "capacity"])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str, capacity: float | None, compiled: bool) -> None:
    """Each device doubles what it gets; values, order, counts and gradients."""
    mesh = xd.init_device_mesh("xla", (2, DEVICES), mesh_dim_names=("dp", "ep"))["ep"]
    kinds = CASES[case].sort(dim=1).values
    counts = torch.nn.functional.one_hot(kinds, DEVICES * KINDS).sum(1)
    rows = [torch.randn(ROWS, WIDTH) for _ in range(DEVICES)]
    weights = [torch.randn(ROWS, WIDTH) for _ in range(DEVICES)]
    slots = row_exchange.slots_for(ROWS, DEVICES, capacity)
    assert slots == (ROWS if capacity is None else 4)

    def there_and_back(own: torch.Tensor, counts: torch.Tensor, weight: torch.Tensor):
        per_kind = row_exchange.kept(counts.view(DEVICES, KINDS), slots)
        to_each = counts.view(DEVICES, KINDS).sum(1)
        sent = row_exchange.send(own, to_each, slots, mesh)
        arrived = xd.collectives.all_to_all(per_kind, mesh)
        order = row_exchange.by_kind(arrived, slots)
        sorted_rows = sent[order]
        again = torch.empty_like(sent)
        again[order] = sorted_rows * 2
        back = row_exchange.give_back(again, ROWS, to_each, slots, mesh)
        (back * weight).sum().backward()
        return sorted_rows.detach(), arrived, back.detach()

    own = xd.from_device_values(rows, mesh).requires_grad_()
    step = xd.compile(there_and_back) if compiled else there_and_back
    found = step(
        own, xd.from_device_values(list(counts), mesh), xd.from_device_values(weights, mesh)
    )
    sorted_rows, arrived, back = (value.local_values() for value in found)
    got, went = expected(rows, counts, slots)
    grads = own.grad.local_values()
    for i in range(DEVICES):
        total = int(arrived[i].sum())
        assert total == len(got[i])
        torch.testing.assert_close(sorted_rows[i][:total], got[i], rtol=0, atol=0)
        assert not sorted_rows[i][total:].any()
        own_rows = went[i].unsqueeze(1)
        torch.testing.assert_close(back[i], torch.where(own_rows, rows[i] * 2, 0), rtol=0, atol=0)
        torch.testing.assert_close(grads[i], torch.where(own_rows, weights[i] * 2, 0))
    if capacity is None:
        assert all(bool(of.all()) for of in went)


def test_slots() -> None:
    assert row_exchange.slots_for(100, 4, None) == 100
    assert row_exchange.slots_for(100, 4, 1.0) == 25
    assert row_exchange.slots_for(100, 4, 1.01) == 26
    assert row_exchange.slots_for(100, 4, 9.0) == 100
    assert row_exchange.slots_for(1, 4, 0.1) == 1
