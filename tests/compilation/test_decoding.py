"""A step that decodes: a cache written in place, called again without a look at what it reads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import xla_dtensor as xd
from xla_dtensor.compilation.objects.kinds import made_of_attributes

VOCABULARY, DIM, PLACES = 32, 16, 12


class Decoder(torch.nn.Module):
    """One layer of attention over a cache of fixed size."""

    def __init__(self, batch: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(VOCABULARY, DIM)
        self.into, self.out = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, VOCABULARY)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, PLACES, DIM))
        self.to(dtype)
        self.register_buffer("tokens", torch.zeros(batch, PLACES, dtype=torch.long))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        token = self.tokens.index_select(1, self.position)
        q, k, v = self.into(self.table(token)).chunk(3, -1)
        self.keys.index_copy_(1, self.position, k)
        self.values[:, self.position] = v
        seen = torch.arange(PLACES, device=q.device) <= self.position
        x = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        self.position.add_(1)
        best = self.out(x)[:, 0].argmax(-1)
        self.tokens.index_copy_(1, self.position, best[:, None])
        return best


def placed(decoder: Decoder) -> Decoder:
    """The vocabulary of the last layer in four parts."""
    mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("tp",))
    cut = lambda name, module, mesh: xd.parallel.shard_by_size(module, mesh)
    cut("out", decoder.out, mesh)
    return xd.distribute_module(decoder, mesh)


PLACES_TO_RUN: dict[str, Callable[[Decoder], Decoder]] = {
    "device": lambda decoder: decoder.to("xla"),
    "mesh": placed,
}


@pytest.mark.parametrize("where", PLACES_TO_RUN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_cpu_torchs(where: str, dtype: torch.dtype) -> None:
    expected = Decoder(3, dtype)
    decoder = PLACES_TO_RUN[where](Decoder(3, dtype))
    step = xd.compile(decoder)
    for restart in (False, True):
        if restart:  # another sequence, other weights, in the same memory
            for each in (expected, decoder):
                with torch.no_grad():
                    each.position.zero_()
                    each.keys.zero_()
                    each.values.zero_()
                    each.out.weight.neg_()
        for number in range(PLACES - 1):
            found = step() if number == 0 else step.again()
            wanted = expected()
            whole = found.full_tensor() if isinstance(found, xd.XLAShardedTensor) else found
            assert whole.tolist() == wanted.tolist()
    assert (step.traces, step.compilations) == (1, 1)
    assert not whole_of(decoder.tokens).equal(torch.zeros(3, PLACES, dtype=torch.long))
    assert torch.equal(whole_of(decoder.tokens), expected.tokens)


def whole_of(x: Any) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, xd.XLAShardedTensor) else x).cpu()


def test_again_is_the_last_call() -> None:
    scale = 2.0
    step = xd.compile(lambda x: x.mul_(scale) + torch.rand(1, device="xla"))
    with pytest.raises(RuntimeError, match=r"again\(\) needs a call before it"):
        step.again()
    x, y = torch.ones(2, device="xla"), torch.ones(3, device="xla")
    torch.manual_seed(0)
    drawn = [(step(x) if i == 0 else step.again()) - x for i in range(3)]
    assert x.tolist() == [8, 8] and len({d[0].item() for d in drawn}) == 3
    torch.manual_seed(0)
    assert [(step(torch.zeros_like(x)))[0].item() for _ in range(3)] == pytest.approx(
        [d[0].item() for d in drawn], rel=1e-4
    )
    step(y)
    step.again()
    assert y.tolist() == [4] * 3
    y.fill_(1)  # values are those of now
    step.again()
    assert y.tolist() == [2] * 3
    scale = 3.0  # which nobody looks for
    step.again()
    assert y.tolist() == [4] * 3
    step(y)
    assert y.tolist() == [12] * 3
    with pytest.raises(RuntimeError, match="call the step itself"):
        xd.compile(lambda: step.again())()
    step.clear_cache()
    with pytest.raises(RuntimeError, match="needs a call"):
        step.again()


def test_again_of_a_step_that_counts() -> None:
    """What the step leaves in Python's objects its next call reads."""
    count = [0]

    def counted(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x * count[0]

    step, x = xd.compile(counted), torch.ones(2, device="xla")
    found = [(step(x) if i == 0 else step.again()).tolist() for i in range(4)]
    assert found == [[i, i] for i in (1, 2, 3, 4)] and count == [4]


def test_again_adds_to_a_gradient() -> None:
    leaf = torch.ones(2, device="xla", requires_grad=True)
    step = xd.compile(lambda: (leaf * 2).sum().backward())
    step()  # there was no gradient
    for number in (2, 3):
        step.again()
        assert leaf.grad is not None and leaf.grad.tolist() == [2 * number] * 2
    leaf.grad = None
    step.again()
    assert leaf.grad is not None and leaf.grad.tolist() == [2, 2]


def _decides(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    n.add_(1)
    return x * 2 if n > 2 else x


def _multiplies(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x = x * n.item()
    n.mul_(2)
    return x


def _selects(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    n.add_(1)
    return x[torch.arange(4, device=x.device) < n] * 2


def _on_the_host(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    n.add_(1)
    return x + (n.cpu() * 2).to(x.device)


LOOKS = [(on, look) for on in ("cpu", "xla") for look in (_decides, _multiplies, _on_the_host)]


@pytest.mark.parametrize(("on", "look"), [*LOOKS, ("xla", _selects)])
def test_again_looks_at_values_of_now(on: str, look: Callable) -> None:
    """Of CPU tensors, and of tensors on the devices that the step finds: what it writes itself, and
    what others write between the calls."""
    expected, n, x = torch.tensor(1.0), torch.tensor(1.0, device=on), torch.arange(4.0)
    step, given = xd.compile(lambda x: look(n, x)), x.to("xla")
    for call in range(6):
        found = step.again() if call else step(given)
        torch.testing.assert_close(found.cpu(), look(expected, x))
        if call == 3:
            for each in (n, expected):
                each.fill_(0.5)
    torch.testing.assert_close(n.cpu(), expected)


def test_again_on_other_tensors() -> None:
    mesh = xd.init_device_mesh("xla", (4,))
    x = xd.distribute_tensor(torch.arange(8.0), mesh, [xd.Shard(0)])
    step = xd.compile(lambda x: x * 2)
    step(x)
    for data in (
        xd.distribute_tensor(torch.arange(8.0), mesh, [xd.Replicate()]),
        xd.distribute_tensor(torch.arange(4.0), mesh, [xd.Shard(0)]),
        xd.distribute_tensor(torch.arange(4.0).double(), mesh, [xd.Shard(0)]),
    ):
        x.data = data
        again = step.again()
        assert again.dtype == data.dtype and torch.equal(whole_of(again), whole_of(data) * 2)


def test_other_loggers_are_no_matter() -> None:
    """What a logger keeps of its levels, and the process's other loggers; levels are."""
    log = logging.getLogger("xla_dtensor.tests.decoding")

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if log.isEnabledFor(logging.DEBUG) else x * 3

    x = torch.ones(1, device="xla")
    log.setLevel(logging.INFO)
    assert step(x).item() == 3
    log.info("a level more in its cache")
    logging.getLogger("xla_dtensor.tests.decoding.more").isEnabledFor(logging.INFO)
    assert step(x).item() == 3 and step.traces == 1
    log.setLevel(logging.DEBUG)
    assert step(x).item() == 2
    logging.disable(logging.CRITICAL)
    try:
        assert step(x).item() == 3
    finally:
        logging.disable(logging.NOTSET)


class Cache:
    """What a library keeps between calls: no dataclass."""

    def __init__(self, *parts: Any) -> None:
        self.parts, self.made = list(parts), 0

    def more(self, x: torch.Tensor) -> torch.Tensor:
        if self.made == 0:
            self.total = torch.zeros_like(x)
            self.made = 1
        return self.total.add_(x)


class Known(Cache):
    pass


def test_objects_that_are_their_attributes() -> None:
    """Another of a class that was named is no other program; one of a class that wasn't is."""
    made_of_attributes(Known)
    for cls, traces in ((Known, 2), (Cache, 6)):
        step = xd.compile(lambda cache, x: cache.more(x) * 2)
        x = torch.ones(2, device="xla")
        for _ in range(3):
            cache = cls(cls())
            assert [step(cache, x)[0].item() for _ in range(2)] == [2, 4]
            assert cache.made == 1 and cache.total.tolist() == [2, 2]
            other = cls(cls())
            other.more(x)
            assert step(other, x)[0].item() == 4 and cache.total.tolist() == [2, 2]
        assert step.traces == traces if cls is Known else step.traces >= traces
