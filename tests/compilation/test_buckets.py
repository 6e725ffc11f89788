"""Arguments that are padded to a few sizes: values as of the unpadded run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import xla_dtensor as xd

TOKENS = torch.randint(0, 50, (8, 40), generator=torch.Generator().manual_seed(1))
VALUES = torch.randn(8, 40, 4, generator=torch.Generator().manual_seed(2))
LENGTHS = (3, 8, 5, 9, 16, 21, 30)  # sizes, and what is below them: 4 devices do not divide it
SIZES = (8, 16, 32)


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()


def masked(values: torch.Tensor, n_values: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    mask = (torch.arange(values.shape[1], device=values.device) < n_values)[:, None]
    h = torch.tanh(values * mask)
    return h.sum() / n_values, h * 2, n_values + 1


PLACEMENTS: dict[str, tuple[Placement, ...] | None] = {
    "one_device": None,
    "replicated": (Replicate(), Replicate()),
    "batch": (Shard(0), Replicate()),
    "padded_dim": (Shard(0), Shard(1)),
    "padded_dim_alone": (Shard(1), Replicate()),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(PLACEMENTS))
def test_seven_lengths_are_three_programs(mesh_2x4: DeviceMesh, name: str) -> None:
    """Placements stay, with lengths that don't divide, too."""
    placements = PLACEMENTS[name]
    step = xd.compile(masked, buckets={"values": {1: SIZES}})
    for n in LENGTHS:
        plain = VALUES[:, :n]
        if placements is None:
            x: Any = plain.to("xla")
        else:
            x = distribute_tensor(plain, mesh_2x4, placements)
        mean, h, number = step(x)
        wanted = masked(plain, n)
        torch.testing.assert_close(whole(mean), wanted[0])
        torch.testing.assert_close(whole(h), wanted[1])
        assert number == wanted[2]
        if placements is not None:
            assert h.placements == placements
    assert (step.traces, step.compilations) == (3, 3)


def test_lookups_are_bit_for_bit_those_of_the_unpadded_run() -> None:
    """And ints are filled with what the user says."""
    table = torch.randn(51, 4, generator=torch.Generator().manual_seed(3))
    device_table = table.to("xla")

    def function(tokens: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = device_table if tokens.device.type == "xla" else table
        return F.embedding(tokens, own), (tokens != 50).sum(1) - length

    buckets = xd.Buckets(1, SIZES, fill=50, length="length")
    step = xd.compile(function, buckets={"tokens": buckets})
    for n in LENGTHS:
        found, rest = step(TOKENS[:, :n].to("xla"))
        wanted, plain_rest = function(TOKENS[:, :n], n)
        assert torch.equal(whole(found), wanted)
        assert torch.equal(whole(rest), plain_rest)
    assert step.compilations == 3


def test_cpu_arguments_are_padded_too() -> None:
    table = torch.randn(50, 4, generator=torch.Generator().manual_seed(3)).to("xla")

    def function(tokens: torch.Tensor, n_tokens: int) -> torch.Tensor:
        return F.embedding(tokens.to("xla"), table) * n_tokens

    step = xd.compile(function, buckets={"tokens": {1: SIZES}})
    for n in LENGTHS:
        wanted = F.embedding(TOKENS[:, :n], table.cpu()) * n
        torch.testing.assert_close(whole(step(TOKENS[:, :n])), wanted)
    assert step.compilations == 3


def test_a_growing_cache_of_keys_and_values() -> None:
    """Attention of one query per call to all that came before."""
    draws = torch.Generator().manual_seed(4)
    queries, keys, values = torch.randn(3, 20, 2, 1, 8, generator=draws)

    def attend(query: Any, keys: Any, values: Any, n: int) -> Any:
        mask = torch.arange(keys.shape[1], device=keys.device) < n
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    buckets = xd.Buckets(1, (4, 8, 32), length="n")
    step = xd.compile(attend, buckets={"keys": buckets, "values": buckets})
    for i in range(20):
        ks, vs = (torch.cat(list(x[: i + 1]), 1) for x in (keys, values))
        wanted = F.scaled_dot_product_attention(queries[i], ks, vs)
        found = step(queries[i].to("xla"), ks.to("xla"), vs.to("xla"))
        torch.testing.assert_close(whole(found), wanted, rtol=1e-5, atol=1e-6)
    assert step.compilations == 3


def test_training_with_padded_batches(mesh_2x4: DeviceMesh) -> None:
    """Parameters go where they go with the unpadded ones."""

    def train(model: Any, optimizer: Any) -> Any:
        def step(values: torch.Tensor, n_values: int) -> torch.Tensor:
            mask = (torch.arange(values.shape[1], device=values.device) < n_values)[:, None]
            loss = (model(values) ** 2 * mask).sum() / n_values
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Linear(4, 4))
    xd.distribute_module(models[1], mesh_2x4)
    plain, ours = (train(m, torch.optim.SGD(m.parameters(), lr=0.05)) for m in models)
    step = xd.compile(ours, buckets={"values": {1: SIZES}})
    for n in (3, 9, 8, 30, 5, 16, 17):
        x = distribute_tensor(VALUES[:, :n], mesh_2x4, [Shard(0), Replicate()])
        torch.testing.assert_close(whole(step(x)), plain(VALUES[:, :n], n))
    torch.testing.assert_close(whole(models[1].weight), models[0].weight)
    assert step.compilations == 3
    assert step.traces == 3  # a loss has no dim to cut, so that none was traced twice


def test_a_history_goes_through_the_padding() -> None:
    step = xd.compile(
        lambda values, n_values: values.sin() * n_values, buckets={"values": {1: (8, 16)}}
    )
    for n in (3, 8, 12):
        x = VALUES[:, :n].to("xla").requires_grad_()
        y = step(x)
        (y * 2).sum().backward()
        torch.testing.assert_close(whole(x.grad), VALUES[:, :n].cos() * 2 * n)


def test_two_dims_and_two_arguments() -> None:
    def function(a: Any, b: Any, rows: int, columns: int) -> Any:
        a = a[:, :4]
        return a.sum(1) * rows, b * columns, a @ b[:4]

    buckets = {
        "a": [xd.Buckets(0, (4, 8), length="rows"), xd.Buckets(1, (16,), length="columns")],
        "b": xd.Buckets(-1, (10, 20), cut={1: 1, 2: -1}),
    }
    step = xd.compile(lambda a, b, rows, columns: function(a, b, rows, columns), buckets=buckets)
    for rows, columns, width in ((3, 7, 9), (4, 16, 10), (8, 5, 20), (5, 6, 11)):
        a, b = torch.randn(rows, columns), torch.randn(4, width)
        wanted = function(a, b, rows, columns)
        for mine, theirs in zip(step(a.to("xla"), b.to("xla")), wanted, strict=True):
            torch.testing.assert_close(whole(mine), theirs)


def test_constants_of_a_buckets_size_are_not_cut() -> None:
    constant = torch.ones(8, device="xla")
    step = xd.compile(lambda values: (values * 2, constant + 1), buckets={"values": {0: (4, 8)}})
    for n in (3, 6, 8):
        scaled, other = step(torch.ones(n, device="xla"))
        assert scaled.tolist() == [2.0] * n
        assert other.tolist() == [2.0] * 8


def test_numbers_stay_inputs_beside_lengths() -> None:
    step = xd.compile(lambda x, t, n_x: x * t + n_x, buckets={"x": {0: (4, 8)}})
    for n, t in ((3, 0.5), (2, 0.25), (4, 0.125), (1, 3.0), (6, 0.5), (7, 0.25), (5, 1.5)):
        assert step(torch.ones(n, device="xla"), t).tolist() == [t + n] * n
    assert step.traces <= 4


def test_in_another_step_nothing_is_padded() -> None:
    inner = xd.compile(lambda x, n_x: x * n_x, buckets={"x": {0: (4, 8)}})
    outer = xd.compile(lambda x: inner(x) + 1)
    assert outer(torch.ones(3, device="xla")).tolist() == [4.0] * 3
    assert inner.why_not(torch.ones(3, device="xla")) == "the step has not been called yet"
    assert "4xf32" in inner.lower(torch.ones(3, device="xla")).as_text()


# --- what is refused -----------------------------------------------------------------------------


def halved(x: torch.Tensor) -> torch.Tensor:
    return x[::2] * 1


AMBIGUOUS = {
    "halved": halved,
    "shorter": lambda x: x[1:] * 1,
    "twice": lambda x: torch.cat([x, x]),
}


@pytest.mark.parametrize("name", list(AMBIGUOUS))
def test_results_of_which_it_is_not_known(name: str) -> None:
    function, x = AMBIGUOUS[name], torch.ones(3, device="xla")
    step = xd.compile(function, buckets={"x": {0: (4, 8)}})
    with pytest.raises(ValueError, match="it isn't known what of it is padding"):
        step(x)
    assert step.traces == 0
    whole_of_it = xd.compile(function, buckets={"x": xd.Buckets(0, (4, 8), cut={})})
    padded = torch.cat([torch.ones(3), torch.zeros(1)])
    assert torch.equal(whole_of_it(x).cpu(), function(padded))


def test_two_lengths_of_one_size() -> None:
    step = xd.compile(lambda x, y: x + y, buckets={"x": {0: (4, 8)}, "y": {0: (4, 8)}})
    assert step(torch.ones(3, device="xla"), torch.ones(3, device="xla")).tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="'x' is 3, 'y' is 2"):
        step(torch.ones(3, device="xla"), torch.ones(2, device="xla"))


def writing(x: torch.Tensor) -> None:
    x.add_(1)


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "too_long": (lambda x: x, torch.ones(9), ValueError, "'x' is 9 long in dim 0, and the largest"),
    "no_tensor": (lambda x: x, [1], TypeError, "'x' has buckets, and is a list"),
    "no_dim": (lambda x: x, torch.ones(()), ValueError, "'x' has buckets for dim 0"),
    "written": (writing, torch.ones(3), ValueError, "writes to its argument 'x'"),
    "written_in_full": (writing, torch.ones(4), ValueError, "writes to its argument 'x'"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused(name: str) -> None:
    function, value, error, text = REFUSED[name]
    step = xd.compile(function, buckets={"x": {0: (4, 8)}})
    x = value.to("xla") if isinstance(value, torch.Tensor) else value
    with pytest.raises(error, match=text):
        step(x)
    if isinstance(x, torch.Tensor):
        assert torch.equal(x.cpu(), value)


def test_lengths_come_from_the_buckets() -> None:
    step = xd.compile(lambda x, n_x=0: x * n_x, buckets={"x": {0: (4, 8)}})
    with pytest.raises(TypeError, match="'n_x' is given by the step's buckets"):
        step(torch.ones(3, device="xla"), 3)


def test_parameters_that_are_not_there() -> None:
    with pytest.raises(TypeError, match=r"a dict says of which parameter.*are \['x'"):
        xd.compile(lambda x: x, buckets=(16, 64))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'y', which the step doesn't have"):
        xd.compile(lambda x: x, buckets={"y": {0: (4,)}})
    with pytest.raises(TypeError, match="to the parameter 'n'"):
        xd.compile(lambda x: x, buckets={"x": xd.Buckets(0, (4,), length="n")})
    for sizes in ((), (0,), (2.5,)):
        with pytest.raises(ValueError, match="positive ints"):
            xd.Buckets(0, sizes)
