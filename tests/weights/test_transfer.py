"""`xd.transfer`: weights of one mesh on another, to the bit; what doesn't fit raises."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.weights import Fused, PartOf, checksums, moves
from xla_dtensor.weights.recipes import places

R, S = Replicate(), Shard


def mesh(*devices: Any) -> DeviceMesh:
    return DeviceMesh("xla", list(devices))


def meshes() -> dict[str, DeviceMesh]:
    """Four devices to train on, and others to sample on: in a row, in a square, more, fewer, one
    in common, another order."""
    return {
        "row": mesh(0, 1, 2, 3),
        "square": mesh([4, 5], [6, 7]),
        "all": mesh([0, 1, 2, 3], [4, 5, 6, 7]),
        "two": mesh(6, 7),
        "one": mesh(5),
        "overlapping": mesh([3, 2], [1, 4]),
    }


def on(tensor: torch.Tensor, where: DeviceMesh, *placements: Any) -> Any:
    return distribute_tensor(tensor, where, list(placements))


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor().detach().cpu()


def each_device_has_its_part(tensor: Any, value: torch.Tensor) -> None:
    """What lies on each device is what the placements say, also of copies."""
    array = tensor.jax_array
    for shard in array.addressable_shards:
        own = torch.from_dlpack(shard.data) if value.dtype != torch.bool else None
        part = value[tuple(slice(s.start, s.stop) for s in shard.index)] if value.ndim else value
        if own is not None:
            own = own[tuple(slice(0, n) for n in part.shape)]  # without padding
            assert torch.equal(own.cpu(), part)


@pytest.mark.one_in(30)
@pytest.mark.parametrize("target", ["row", "square", "all", "two", "one", "overlapping"])
@pytest.mark.parametrize("source", ["row", "all", "one"])
def test_any_layout_to_any_other(source: str, target: str) -> None:
    known, chosen = meshes(), random.Random(f"{source} {target}")

    def placements(where: DeviceMesh, ndim: int) -> list[Any]:
        choices = [R, *map(S, range(ndim))]
        return [chosen.choice(choices) for _ in range(where.ndim)]

    state, expected, placed = {}, {}, {}
    shapes: list[tuple[int, ...]] = [(8, 6), (5, 7), (1, 3), (16,), (3,), (), (0, 4), (2, 3, 5)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    for number, shape in enumerate(shapes):
        dtype = dtypes[number % len(dtypes)]
        value = (torch.randn(shape) * 4).to(dtype)
        name = f"weight {number}"
        where = known[source]
        state[name] = on(value, where, *placements(where, len(shape)))
        expected[name], placed[name] = value, placements(known[target], len(shape))
    found = xd.transfer(state, known[target], lambda name, shape: placed[name], check=True)
    assert list(found) == list(state)
    for name, value in expected.items():
        tensor: Any = found[name]
        assert tensor.device_mesh == known[target] and list(tensor.placements) == placed[name]
        assert tensor.dtype == value.dtype and torch.equal(whole(tensor), value), name
        each_device_has_its_part(tensor, value)
        assert torch.equal(whole(tensor + tensor), value + value)  # it is a tensor like others


# --- fused weights ------------------------------------------------------------------------------


def by_groups(tensors: list[torch.Tensor], groups: int, dim: int = 0) -> torch.Tensor:
    """What inference servers load: the first group of each, then the second."""
    cut = [t.chunk(groups, dim) for t in tensors]
    return torch.cat([part[g] for g in range(groups) for part in cut], dim)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("placements", [(R, S(0)), (S(0), S(1)), (S(1), S(0)), (S(0), S(0))])
def test_query_key_and_value_of_other_sizes(groups: int, placements: Any) -> None:
    """Grouped attention has fewer keys than queries: halves of the whole are no group."""
    known = meshes()
    qkv = {"q": torch.randn(16, 6), "k": torch.randn(8, 6), "v": torch.randn(8, 6)}
    state = {n: on(t, known["row"], S(i % 2)) for i, (n, t) in enumerate(qkv.items())}
    names = {"qkv": Fused(("q", "k", "v"), groups=groups)}
    found = xd.transfer(state, known["square"], placements, names=names, check=True)
    fused = by_groups(list(qkv.values()), groups)
    assert torch.equal(whole(found["qkv"]), fused)
    sizes = tuple(len(t) for t in qkv.values())
    back = {n: PartOf("qkv", sizes, i, groups=groups) for i, n in enumerate(qkv)}
    again = xd.transfer(found, known["row"], [S(0)], names=back, check=True)
    for name, value in qkv.items():
        assert torch.equal(whole(again[name]), value), name


def test_each_tensor_parallel_device_has_its_heads() -> None:
    """With as many groups as devices a shard of the fused weight is the fused shards."""
    known = meshes()
    gate, up = torch.randn(8, 4), torch.randn(8, 4)
    state = {"gate": on(gate, known["row"], S(0)), "up": on(up, known["row"], S(1))}
    names = {"gate_up": Fused(("gate", "up"), groups=2)}
    found = xd.transfer(state, known["two"], [S(0)], names=names)
    shards = [torch.from_dlpack(s.data) for s in found["gate_up"].jax_array.addressable_shards]
    for rank, shard in enumerate(shards):
        wanted = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        assert torch.equal(shard, wanted)


def test_from_one_interleaving_to_another_and_repeated_heads() -> None:
    known = meshes()
    q, k = torch.randn(8, 3), torch.randn(4, 3)
    state = {"qk": on(by_groups([q, k], 4), known["row"], S(0))}
    parts = [PartOf("qk", (8, 4), i, groups=4) for i in (0, 1)]
    names = {"qk": Fused((*parts, parts[1]), groups=2), "turned": Fused(tuple(parts[::-1]))}
    found = xd.transfer(state, known["square"], [S(0), R], names=names, check=True)
    assert torch.equal(whole(found["qk"]), by_groups([q, k, k], 2))
    assert torch.equal(whole(found["turned"]), torch.cat([k, q]))


def test_fused_along_another_dim() -> None:
    known = meshes()
    a, b = torch.randn(3, 4, 2), torch.randn(3, 8, 2)
    state = {"a": on(a, known["row"], S(1)), "b": on(b, known["row"], R)}
    names = {"ab": Fused(("a", "b"), dim=-2, groups=2)}
    found = xd.transfer(state, known["square"], [S(1), S(0)], names=names, check=True)
    assert torch.equal(whole(found["ab"]), by_groups([a, b], 2, 1))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"qkv": Fused(("q", "k", "v", "w"))}, "there is no w in the state"),
        ({"qkv": Fused(("q", "k", "v"), groups=3)}, "isn't cut in 3 groups"),
        ({"qkv": Fused(("q", "k", "v"), dim=1)}, "parts don't fit"),
        ({"qkv": Fused(("q", "k", "v"), dim=2)}, "there is no dim 2"),
        ({"qkv": Fused(())}, "fused of nothing"),
        ({"a": PartOf("q", (4, 5), 0), "b": "k", "c": "v"}, "have to have 8 together"),
        ({"a": PartOf("q", (4, 4), 2), "b": "k", "c": "v"}, "index to be one of them"),
        ({"a": PartOf("q", (6, 2), 0, groups=4), "b": "k", "c": "v"}, "isn't cut in 4 groups"),
    ],
)
def test_recipes_that_do_not_fit(names: Any, said: str) -> None:
    known = meshes()
    state = {n: on(torch.randn(s, 4), known["row"], S(0)) for n, s in zip("qkv", (8, 4, 4))}  # noqa: B905
    with pytest.raises(ValueError, match=said):
        xd.transfer(state, known["square"], names=names)


# --- weights that are written to ------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.into = nn.Embedding(16, 8), nn.Linear(8, 24)
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(self.embedding(x)).chunk(3, -1)
        return self.out(torch.softmax(q @ k.mT, -1) @ v * self.scale)


def cut(where: DeviceMesh, *placements: Any) -> Callable[[nn.Module], nn.Module]:
    def apply(name: str, module: nn.Module, _: Any) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            dims = [s if not isinstance(s, Shard) or s.dim < p.ndim else R for s in placements]
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, where, dims)))

    return lambda module: xd.distribute_module(module, where, apply)


def test_train_and_sample(tmp_path: Any) -> None:
    """Four devices train and four sample by a compiled step, which is compiled once."""
    torch.manual_seed(0)
    expected, model, copy = Model(), Model(), Model()
    model.load_state_dict(expected.state_dict())
    trainer = cut(meshes()["row"], S(0))(model)
    sampler = cut(meshes()["square"], S(1), S(0))(copy).eval()
    tie = lambda m: setattr(m.out, "weight", m.embedding.weight)
    tie(trainer), tie(sampler)
    sample = xd.compile(torch.no_grad()(lambda x: sampler(x)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (expected, trainer)]
    x = torch.randint(0, 16, (3, 5))
    there = on(x, meshes()["row"], R)
    here = on(x, meshes()["square"], R, R)
    for _ in range(3):
        for m, data, optimizer in zip((expected, trainer), (x, there), optimizers, strict=True):
            optimizer.zero_grad()
            m(data).square().mean().backward()
            optimizer.step()
        found = xd.transfer(trainer, sampler, check=True)
        assert found["into.weight"] is sampler.into.weight
        for name, parameter in sampler.named_parameters():
            assert torch.equal(whole(parameter), whole(trainer.get_parameter(name)))
        torch.testing.assert_close(whole(sample(here)), expected(x).detach())
    assert sample.compilations == 1 and sampler.out.weight is sampler.embedding.weight


def test_what_is_written_is_no_longer_the_source() -> None:
    """On the same devices, too: the next step of the trainer, which overwrites its weights, is none
    of the sampler's."""
    for where in ("row", "square"):
        source = on(torch.arange(8.0), meshes()["row"], S(0))
        target = on(torch.zeros(8), meshes()[where], *[S(0)] * meshes()[where].ndim)
        made = xd.transfer({"w": source}, meshes()[where], list(target.placements))
        xd.transfer({"w": source}, {"w": target})
        double = xd.compile(lambda x: x.mul_(2))
        double(source)
        source.add_(1)
        for found in (made["w"], target):
            assert torch.equal(whole(found), torch.arange(8.0))
        double(target)
        assert torch.equal(whole(source), torch.arange(8.0) * 2 + 1)
        xd.transfer({"w": source}, {"w": target}, check=True)
        assert torch.equal(whole(target), torch.arange(8.0) * 2 + 1)


def test_operations_that_wait_have_the_values_of_their_time() -> None:
    known = meshes()
    source, target = on(torch.ones(8), known["row"], S(0)), on(torch.zeros(8), known["two"], S(0))
    view, later = target[2:4], target + 1
    source.mul_(3)  # waits
    xd.transfer({"w": source}, {"w": target})
    assert whole(later).tolist() == [1] * 8 and whole(view).tolist() == [3, 3]


def test_views_are_sources() -> None:
    known = meshes()
    value = torch.randn(6, 8)
    source = on(value, known["row"], R)
    found = xd.transfer({"w": source.t()[2:]}, known["square"], [S(0), S(1)], check=True)
    assert torch.equal(whole(found["w"]), value.t()[2:])
    with pytest.raises(ValueError, match="is a view"):
        xd.transfer({"w": on(value.t(), known["row"], R)}, {"w": source.t()})


def test_other_dtypes() -> None:
    known = meshes()
    row = known["row"]
    state = {"w": on(torch.randn(8, 4), row, S(0)), "n": on(torch.arange(4), row, R)}
    found = xd.transfer(state, known["two"], [S(0)], dtype=torch.bfloat16, check=True)
    assert torch.equal(whole(found["w"]), whole(state["w"]).bfloat16())
    assert found["n"].dtype == torch.int64
    with pytest.raises(ValueError, match=r"give dtype=torch\.bfloat16"):
        xd.transfer(state, found)
    xd.transfer(state, found, dtype=torch.bfloat16)


def test_what_does_not_fit_changes_nothing() -> None:
    known = meshes()
    square = torch.randn(4, 6)
    state = {"a": on(torch.ones(3), known["row"], R), "b": on(square, known["row"], S(0))}
    targets = {"a": on(torch.zeros(3), known["two"], R), "b": on(square.t(), known["two"], S(0))}
    with pytest.raises(ValueError, match=r"'b' is \[4, 6\].*\[6, 4\]"):
        xd.transfer(state, targets)
    assert whole(targets["a"]).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="b would go nowhere"):
        xd.transfer(state, {"a": targets["a"]}, names={"a": "a"})
    with pytest.raises(ValueError, match="there is no c"):
        xd.transfer(state, {**targets, "c": targets["a"]})
    with pytest.raises(ValueError, match="nothing to write to for d"):
        xd.transfer(state, targets, names={"d": "a"})
    tied = {"a": targets["a"], "c": targets["a"]}
    with pytest.raises(ValueError, match="are tied"):
        xd.transfer({"a": state["a"], "c": on(torch.ones(3), known["row"], R)}, tied)
    with pytest.raises(TypeError, match="has to be on xla devices"):
        xd.transfer({"a": torch.ones(3)}, known["two"])
    with pytest.raises(ValueError, match="placements="):
        xd.transfer(state, targets, [R])
    with pytest.raises(xd.UnsupportedOpError, match="differs from device to device"):
        pending = DTensor.from_local(torch.ones(3, device="xla"), known["row"], [Partial()])
        xd.transfer({"a": pending}, known["two"])
    with pytest.raises(xd.UnsupportedOpError, match="one of one device will do"):
        xd.transfer({"a": state["a"]}, {"a": torch.zeros(3, device="xla")})
    with pytest.raises(xd.UnsupportedOpError, match=r"xd\.transfer in a compiled step"):
        xd.compile(lambda: xd.transfer(state, known["two"]))()


def test_tied_weights_stay_tied_and_are_sent_once() -> None:
    known = meshes()
    w = on(torch.randn(8, 4), known["row"], S(0))
    found = xd.transfer({"a": w, "b": w}, known["two"], [S(0)])
    assert found["a"] is found["b"] and found.count == 4


def test_there_are_no_values_in_a_plan() -> None:
    with xd.abstract("cpu:8"):
        where = xd.init_device_mesh("xla", (8,))
        state = {"w": on(torch.ones(8), where, S(0))}
        with pytest.raises(xd.UnsupportedOpError, match="has no value"):
            xd.transfer(state, where)


def test_of_one_device_without_a_mesh() -> None:
    found = xd.transfer({"w": torch.arange(6.0).to("xla")}, meshes()["square"], [S(0), R])
    assert torch.equal(whole(found["w"]), torch.arange(6.0))


# --- memory, checksums ------------------------------------------------------------------------


@pytest.mark.parametrize("names", [None, {"ab": Fused(("a", "b"), groups=2)}])
def test_pieces_are_as_small_as_asked(names: Any) -> None:
    """XLA's own analysis of each program is within the limit."""
    known = meshes()
    a, b = torch.randn(64, 32), torch.randn(64, 32)
    state = {"a": on(a, known["row"], S(0)), "b": on(b, known["row"], S(1))}
    found = xd.transfer(state, known["square"], [S(1), S(0)], names=names, limit=512, check=True)
    expected = {"ab": by_groups([a, b], 2)} if names else {"a": a, "b": b}
    for name, value in expected.items():
        assert torch.equal(whole(found[name]), value)
    assert 256 < found.bytes <= 512 and found.count >= 2 * 64 * 32 * 4 // 512
    whole_shards = xd.transfer(state, known["square"], [S(1), S(0)], names=names)
    assert whole_shards.bytes > 512 and whole_shards.count < found.count
    again = xd.transfer(state, known["square"], [S(1), S(0)], names=names, limit=512)
    assert again.bytes == found.bytes
    with pytest.raises(ValueError, match="less than one element"):
        xd.transfer(state, known["square"], names=names, limit=3)


def test_the_second_transfer_compiles_nothing(compiles: Callable[[], int]) -> None:
    known = meshes()
    source = on(torch.randn(16, 6), known["row"], S(0))
    target = on(torch.zeros(16, 6), known["square"], S(1), S(0))
    xd.transfer({"w": source}, {"w": target})
    source.add_(1)
    value = whole(source)
    compiles()
    xd.transfer({"w": source}, {"w": target})
    assert compiles() == 0
    assert torch.equal(whole(target), value)


def test_checksums_tell_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale shard, one in another's place, a copy that differs, one turned around."""
    known = meshes()
    value = torch.randn(4, 4)
    target = on(value, known["square"], S(0), R)
    source = [xd.to_jax(on(value, known["row"], S(1)))]
    what = places("w", "w", {"w": (4, 4)})
    right = checksums.of_sources(what, source, source[0].dtype)
    form = target._form
    assert checksums.of_target(target.jax_array, form) == {right}
    shards = [s.data for s in target.jax_array.addressable_shards]

    def of(*data: Any) -> Any:
        placed = [jax.device_put(d, s.device) for d, s in zip(data, shards, strict=True)]
        array = jax.make_array_from_single_device_arrays((4, 4), form.sharding, placed)
        return checksums.of_target(array, form)

    assert of(*shards) == {right}
    assert of(shards[2], shards[3], shards[0], shards[1]) != {right}  # the halves exchanged
    assert of(shards[0], shards[1], shards[2] * 0.5, shards[3] * 0.5) != {right}
    assert of(shards[0], shards[1], shards[2], shards[3] * 0.5) == {-1}  # one copy alone
    assert of(*(s[::-1] for s in shards)) != {right}
    turned = on(value.t().contiguous(), known["square"], S(0), R)
    assert checksums.of_target(turned.jax_array, form) != {right}

    sent = moves.Moves._sent_to
    stale = lambda *args: sent(*args) * 0 if args[2].box[0][0] else sent(*args)
    monkeypatch.setattr(moves.Moves, "_sent_to", stale)
    state = {"w": on(value, known["row"], S(0))}
    with pytest.raises(RuntimeError, match="'w' isn't what it was"):
        xd.transfer(state, {"w": target}, check=True)
    assert torch.equal(whole(target), value)  # as it was
