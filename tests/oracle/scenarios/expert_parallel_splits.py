"""Expert parallelism whose all-to-alls send as many rows as the values say, as libraries write it:
torchtitan (functional, rows sorted by a permutation), Megatron (an autograd function around
``all_to_all_single``, parts by ``split``) and transformers (``repeat_interleave``)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4

RANKS, LOCAL, ROWS, DIM = 4, 2, 9, 4
EXPERTS = RANKS * LOCAL


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, rows: Any, outputs: Any, inputs: Any) -> Any:
        ctx.given = group, outputs, inputs
        made = rows.new_empty([sum(outputs), *rows.size()[1:]])
        dist.all_to_all_single(made, rows.contiguous(), outputs, inputs, group=group)
        return made

    @staticmethod
    def backward(ctx: Any, *grad: Any) -> Any:
        group, outputs, inputs = ctx.given
        return None, AllToAll.apply(group, *grad, inputs, outputs), None, None


def counted(ids: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(EXPERTS, dtype=torch.int64, device=ids.device)
    return zeros.scatter_add(0, ids, torch.ones_like(ids))


def expert(rows: torch.Tensor, up: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(rows @ up + shift).exp() / 2


def titan(x: Any, ids: Any, up: Any, shift: Any, group: Any) -> torch.Tensor:
    order = torch.argsort(ids, stable=True)
    counts = counted(ids)
    with torch.no_grad():
        arrived = funcol.all_to_all_single(counts, None, None, group)
        arrived = torch.ops._c10d_functional.wait_tensor(arrived)
        sent = counts.view(RANKS, -1).sum(1).to(torch.device("cpu"), non_blocking=True)
        got = arrived.view(RANKS, -1).sum(1).to(torch.device("cpu"), non_blocking=False)
        sent, got = sent.tolist(), got.tolist()
    rows = funcol.all_to_all_single_autograd(x[order], got, sent, group)
    table = arrived.view(RANKS, LOCAL)
    lengths = table.t().reshape(-1)
    starts = (arrived.cumsum(0) - arrived).view(RANKS, LOCAL).t().reshape(-1)
    segment = torch.arange(len(lengths), device=x.device)
    segment = segment.repeat_interleave(lengths, output_size=rows.shape[0])
    places = torch.arange(segment.shape[0], device=x.device)
    places = starts[segment] + places - (lengths.cumsum(0) - lengths)[segment]
    kind = segment // RANKS  # which of this rank's experts
    sorted_rows = rows[places, :]
    hidden = torch.stack([expert(sorted_rows, up[i], shift[i]) for i in range(LOCAL)])
    one_hot = kind == torch.arange(LOCAL, device=x.device).unsqueeze(1)
    hidden = torch.where(one_hot.unsqueeze(-1), hidden, 0).sum(0)
    unsorted = hidden.new_empty(rows.shape)
    unsorted[places, :] = hidden
    back = funcol.all_to_all_single_autograd(unsorted, sent, got, group)
    return torch.zeros_like(x).index_add(0, order, back)


def megatron(x: Any, ids: Any, up: Any, shift: Any, group: Any) -> torch.Tensor:
    order = torch.argsort(ids, stable=True)
    counts = counted(ids).view(RANKS, LOCAL)
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts, group=group)
    sent, got = torch.stack([counts.sum(1), arrived.sum(1)]).tolist()
    rows = AllToAll.apply(group, x[order], got, sent)
    parts = rows.split(arrived.flatten().tolist())
    of_kinds = [torch.cat(parts[i::LOCAL]) for i in range(LOCAL)]
    hidden = [expert(part, up[i], shift[i]) for i, part in enumerate(of_kinds)]
    pieces = [h.split(arrived[:, i].tolist()) for i, h in enumerate(hidden)]
    hidden_rows = torch.cat([piece for pair in zip(*pieces, strict=True) for piece in pair])
    back = AllToAll.apply(group, hidden_rows, sent, got)
    unsorted = torch.empty_like(back)
    unsorted[order] = back
    return unsorted


def transformers(x: Any, ids: Any, up: Any, shift: Any, group: Any) -> torch.Tensor:
    order = torch.argsort(ids, stable=True)
    counts = counted(ids).view(RANKS, LOCAL)
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts, group=group)
    sent, got = torch.stack([counts.sum(dim=1), arrived.sum(dim=1)]).tolist()
    rows = funcol.all_to_all_single_autograd(x[order], got, sent, group)
    kind = torch.arange(LOCAL, device=x.device).repeat(RANKS)
    kind = kind.repeat_interleave(arrived.reshape(-1), output_size=sum(got)).unsqueeze(-1)
    weights = torch.ones_like(kind, dtype=rows.dtype)
    hidden = sum(expert(rows, up[i], shift[i]) * (kind == i) for i in range(LOCAL)) * weights
    balance = hidden.mean(0) * 0.1 + hidden.sum(0) / (hidden.shape[0] + 1)
    back = funcol.all_to_all_single_autograd(hidden, sent, got, group)
    unsorted = torch.empty_like(back)
    unsorted[order] = back
    return unsorted + balance


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((RANKS,), ("ep",))
    group = mesh.get_group()
    drawn = oracle.local("ids", (ROWS,), ("ep",), dtype=torch.int64, high=EXPERTS)
    cases = {"drawn": drawn, "two experts": torch.where(drawn < 4, 5, 2), "one": drawn * 0 + 3}
    for function in (titan, megatron, transformers):
        for case, ids in cases.items():
            if function is transformers and case != "drawn":
                continue  # its mean over no rows is NaN
            name = f"{function.__name__}.{case}"
            x = oracle.local("x", (ROWS, DIM), ("ep",), requires_grad=True)
            up = oracle.local("up", (LOCAL, DIM, DIM), ("ep",), requires_grad=True)
            shift = oracle.local("shift", (LOCAL, DIM), ("ep",), requires_grad=True)
            y = function(x, ids, up, shift, group)
            oracle.dump(f"{name}.y", y)
            (y - x).square().sum().backward()
            for leaf, tensor in (("x", x), ("up", up), ("shift", shift)):
                oracle.dump_grad(f"{name}.grad.{leaf}", tensor)
