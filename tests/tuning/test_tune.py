"""`xd.tune`: what it finds where the answer is known, and that what it finds trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from tests.planning.gpus import needs_gpu_compiler
from tests.tuning.programs import Model, batch, build, training
from xla_dtensor.errors import TopologyError
from xla_dtensor.tuning import Configuration, Tuned, search
from xla_dtensor.tuning.picture import pareto


def have_memory(monkeypatch: pytest.MonkeyPatch, nbytes: float) -> None:
    """Simulated devices have so much, from now on."""
    init = search.Search.__init__

    def short(self: Any, *args: Any) -> None:
        init(self, *args)
        self._memory = nbytes

    monkeypatch.setattr(search.Search, "__init__", short)


def cut(own: Configuration, name: str) -> tuple[int | None, ...]:
    return tuple(own.parameters[name])


@pytest.mark.slow
def test_many_rows_keep_parameters_whole() -> None:
    """A step of few parameters and much data moves gradients alone."""
    found = xd.tune(build(), batch(4096), topology="cpu:8", top=1)
    assert found.best.mesh == {"dp": 8} and found.best.batch == (0,)
    assert {d for dims in found.best.parameters.values() for d in dims} == {None}
    report = found.trials[0].report
    assert report is not None
    assert {(row.kind, row.dims) for row in report.collectives} == {("all-reduce", ("dp",))}


def test_few_rows_cut_products() -> None:
    """Of much more parameters than data the data move, as under tensor parallelism: a column of
    one product and the rows of the next are on one device."""
    found = xd.tune(build(256), batch(8, 256), topology="cpu:8", mesh={"tp": 8}, top=1)
    own = found.best
    assert own.mesh == {"tp": 8} and own.batch == (None,)
    assert cut(own, "layers.0.up.weight") == (0,) and cut(own, "layers.0.down.weight") == (1,)
    assert cut(own, "layers.0.up.bias") == (0,) and cut(own, "layers.0.down.bias") == (None,)


@pytest.mark.slow
def test_what_does_not_fit_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallelism becomes FSDP where a device has no memory for the whole."""
    whole = xd.tune(build(256), batch(4096, 256), topology="cpu:8", dims=("dp",), top=1)
    needed = whole.trials[0].estimate.memory
    have_memory(monkeypatch, 0.8 * needed)
    found = xd.tune(build(256), batch(4096, 256), topology="cpu:8", dims=("dp",), top=0)
    own = found.best
    assert any(cut(own, f"layers.0.{part}.weight") != (None,) for part in ("up", "down"))
    assert found.trials[0].estimate.memory <= 0.8 * needed
    # Equal layers lie alike.
    for name, dims in own.parameters.items():
        assert own.parameters[name.replace("layers.1", "layers.0")] == dims
    recomputed = {t.configuration.recompute for t in found.trials}
    assert recomputed == {"nothing", "layers"}  # it was short of memory
    # Of one mesh nothing is listed that is the same program, or as quick with more memory.
    table = xd.tune(build(256), batch(4096, 256), topology="cpu:8", top=0).trials
    configurations = [t.configuration for t in table]
    assert len(table) > 4
    assert all(own not in configurations[:i] for i, own in enumerate(configurations))
    assert len(table) == len(
        {(*t.configuration.mesh.items(), t.configuration.recompute, t.estimate.rank) for t in table}
    )


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("topology", "run"), [("cpu:8", True), ("here", None)])
def test_the_best_trains_as_torch(topology: str, run: bool | None) -> None:
    data = batch(32)
    found = xd.tune(build(), data, topology=topology, top=2, run=run)
    assert found.trials[0].known_by == "measured"
    measured = [t.measured for t in found.trials if t.measured is not None]
    assert measured == sorted(measured) and len(measured) == 2
    expected = build()(lambda model: model)
    step = xd.compile(build()(found.best.apply))
    placed = found.best.place(*data)
    for _ in range(3):
        loss = step(*placed).full_tensor().cpu()
        torch.testing.assert_close(loss, expected(*data), rtol=1e-4, atol=1e-5)


def test_parameters_that_are_pinned() -> None:
    pinned = {"layers.*.up.weight": {"dp": 1}, "head.*": {}}
    found = xd.tune(build(), batch(4096), topology="cpu:8", top=1, pinned=pinned)
    for trial in found.trials:
        own = trial.configuration
        axes = [*own.mesh]
        wanted = tuple(1 if axis == "dp" else None for axis in axes)
        assert all(cut(own, f"layers.{i}.up.weight") == wanted for i in range(3))


def test_it_says_what_it_left_out() -> None:
    found = xd.tune(build(), batch(64), topology="cpu:8", minutes=0.0)
    assert any("of 4 meshes were not looked at" in note for note in found.notes)
    assert found.trials[0].report is not None  # the best so far is compiled all the same
    assert "were not looked at" in str(found)


@pytest.mark.slow
def test_it_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="xla_dtensor"):
        xd.tune(build(), batch(64), topology="cpu:8", top=1)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("xd.tune")]
    assert [line[:21] for line in lines[:4]] == [f"xd.tune: mesh {i} of 4:" for i in range(1, 5)]
    assert lines[4].startswith("xd.tune: XLA is asked for the best 1 of ") and not lines[5:]


@pytest.mark.slow
def test_the_same_twice() -> None:
    one, two = (xd.tune(build(), batch(64), topology="cpu:8", top=2) for _ in range(2))
    assert one.as_json() == two.as_json()


def test_json_and_files(tmp_path: Any) -> None:
    found = xd.tune(build(), batch(64), topology="cpu:8", top=2)
    again = Tuned.from_json(found.as_json())
    assert str(again) == str(found) and again.as_json() == found.as_json()
    for ending in (".json", ".txt", ".py"):
        found.save(tmp_path / f"a{ending}")
    assert (tmp_path / "a.py").read_text() == found.best.as_code()
    with pytest.raises(ValueError, match=r"write \.json, \.txt"):
        found.save(tmp_path / "a.doc")
    with pytest.raises(ValueError, match="nobody knows how long a step takes on cpu:8"):
        found.save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="no result of"):
        Tuned.from_json("{}")


def test_the_table_says_what_its_times_have_in_them() -> None:
    found = xd.tune(build(), batch(64), topology="cpu:8", top=1)
    assert "latencies" not in str(found)  # nobody knows any of them
    estimated = replace(found.trials[1], estimate=replace(found.trials[1].estimate, compute=1.0))
    said = str(replace(found, trials=(found.trials[0], estimated)))
    assert "estimate: products, collectives and" in said and "compiler: " not in said


def test_a_step_takes_what_its_products_take() -> None:
    """Of a kernel that XLA's order of instructions has no time for, too."""
    trial = xd.tune(build(), batch(64), topology="cpu:8", mesh={"dp": 8}, top=1).trials[0]
    assert trial.report is not None
    report = replace(trial.report, scheduled=1.0, seconds={"compute": 2.0, "memory": 3.0})
    assert replace(trial, report=report).seconds == 2.0
    assert replace(trial, report=replace(report, scheduled=4.0)).seconds == 4.0


def test_nothing_fits() -> None:
    found = xd.tune(build(), batch(64), topology="cpu:8", top=1)
    none = Tuned("cpu:8", tuple(replace(t, available=1024.0, report=None) for t in found.trials))
    assert not none.fits and "doesn't fit" in str(none)
    with pytest.raises(RuntimeError, match=r"nothing fits on cpu:8: dp=8 .* needs .* of 1\.0 KiB"):
        none.best  # noqa: B018


@pytest.mark.parametrize("granted", [0.5, 2.0])
def test_what_is_to_stay_free_does(granted: float) -> None:
    """Whatever XLA would allow a compiled step, and whatever was asked for."""
    (trial,) = xd.tune(build(), batch(64), topology="cpu:8", mesh={"tp": 8}, top=1).trials
    assert trial.report is not None and trial.fits
    memory = replace(trial.report.memory, available=int(granted * trial.memory))
    report = replace(trial.report, memory=memory)
    asked = 0.9 * trial.memory if granted > 1 else 1.1 * trial.memory
    short = Tuned("cpu:8", (replace(trial, available=asked, report=report),))
    assert not short.fits and "doesn't fit" in str(short)
    limit = min(granted, 0.9) * trial.memory / 1024
    assert f"on a device of {limit:.1f} KiB" in short.lacks()


@pytest.mark.parametrize("recompute", [("all",), "layers", ()])
def test_what_may_be_computed_again(recompute: Any) -> None:
    with pytest.raises(ValueError, match=r"recompute=.*: it has nothing, attention, layers"):
        xd.tune(build(), batch(8), topology="cpu:8", recompute=recompute)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="reserve=2"):
        xd.tune(build(), batch(8), topology="cpu:8", reserve=2)
    with pytest.raises(TopologyError, match="name a kind and a shape"):
        xd.tune(build(), batch(8), topology="v5e")
    with pytest.raises(TopologyError, match="no mesh of 8 devices"):
        xd.tune(build(), batch(8), topology="cpu:8", mesh={"tp": 3})
    with pytest.raises(ValueError, match=r"hasn't called parallelize\(model\)"):
        xd.tune(lambda parallelize: lambda x, y: x, batch(8), topology="cpu:8")
    x, y = batch(8)
    for one in (x, {"x": x, "y": y}):
        with pytest.raises(ValueError, match=f"batch is a {type(one).__name__}: give the step's"):
            xd.tune(build(), one, topology="cpu:8")


def test_an_optimizer_of_before_is_refused() -> None:
    def late(parallelize: Any) -> Any:
        model = nn.Linear(64, 1)
        optimizer = torch.optim.SGD(model.parameters())
        parallelize(model)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            (model(x) - y).square().mean().backward()
            optimizer.step()

        return step

    with pytest.raises(ValueError, match=r"an optimizer before it called parallelize\(model\)"):
        xd.tune(late, batch(64), topology="cpu:8", top=0)


def test_a_model_without_layers_is_not_computed_again() -> None:
    def alone(parallelize: Any) -> Any:
        model = parallelize(nn.Linear(64, 1))
        return lambda x, y: (model(x) - y).square().mean().backward()

    found = xd.tune(alone, batch(64), topology="cpu:8", recompute=("layers", "nothing"), top=1)
    assert {t.configuration.recompute for t in found.trials} == {"nothing"}
    with pytest.raises(ValueError, match="layers to compute again, which recompute"):
        xd.tune(alone, batch(64), topology="cpu:8", recompute=("layers",))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(512, 32), nn.Linear(32, 512, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


def test_tied_weights_lie_alike() -> None:
    tokens = torch.arange(32).reshape(4, 8)

    tied = training(Tied, torch.optim.SGD, 0.1)
    # By any of its names, of which the first pattern counts.
    pinned = {"head.*": {"tp": 0}, "head.weight": {"tp": 1}}
    found = xd.tune(tied, (tokens,), topology="cpu:8", mesh={"tp": 8}, pinned=pinned, top=1)
    assert cut(found.best, "table.weight") == cut(found.best, "head.weight") == (0,)
    expected, step = tied(lambda model: model), xd.compile(tied(found.best.apply))
    for _ in range(2):
        loss = step(*found.best.place(tokens)).full_tensor().cpu()
        torch.testing.assert_close(loss, expected(tokens), rtol=1e-4, atol=1e-5)


def test_a_small_argument_stays_whole() -> None:
    data = (*batch(4096), torch.ones(1))

    def weighted(parallelize: Any) -> Any:
        step = build()(parallelize)
        return lambda x, y, weight: step(x * weight, y)

    found = xd.tune(weighted, data, topology="cpu:8", top=1)
    assert found.best.mesh == {"dp": 8}
    assert found.best.place(*data)[2].placements == (xd.Replicate(),)


def test_one_device() -> None:
    found = xd.tune(build(), batch(64), topology="cpu:1", top=1)
    assert found.best.mesh == {"dp": 1}


def test_two_models_are_refused() -> None:
    def two(parallelize: Any) -> Any:
        first, second = parallelize(nn.Linear(64, 64)), parallelize(nn.Linear(64, 1))
        return lambda x, y: (second(first(x)) - y).square().mean().backward()

    with pytest.raises(ValueError, match="more than once"):
        xd.tune(two, batch(64), topology="cpu:8")


@pytest.mark.parametrize(
    ("pinned", "message"),
    [
        ({"no.such": {"tp": 0}}, "no parameter is called no.such"),
        ({"head.*": {"xp": 0}}, "by the names of mesh dims"),
        ({"head.*": 0}, "by the names of mesh dims"),
        ({"head.*": {"tp": 1}}, "head.bias has 1 dims"),
        ({"head.*": {"tp": -1}}, "counted from 0"),
    ],
)
def test_pins_that_cannot_be(pinned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        xd.tune(build(), batch(64), topology="cpu:8", pinned=pinned, top=1)


def test_the_front() -> None:
    assert pareto([(3, 1), (1, 5), (2, 2), (2, 7), (4, 1)]) == [(1, 5), (2, 2), (3, 1)]


def in_parts(parallelize: Any, microbatches: int) -> Any:
    """A step that sums the gradients of parts of its batch; each device has rows of each part."""
    torch.manual_seed(0)
    model = parallelize(Model(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=x.device)
        rows = [t.unflatten(0, (-1, microbatches)) for t in (x, y)]
        for i in range(microbatches):
            own, target = (t.select(1, i) for t in rows)
            loss = (model(own) - target).square().mean() / microbatches
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


@pytest.mark.slow
def test_microbatches_save_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batch(4096)
    plenty = xd.tune(in_parts, data, topology="cpu:8", dims=("dp",), top=0)
    assert {t.configuration.microbatches for t in plenty.trials} == {1}
    needed = plenty.trials[0].estimate.memory
    have_memory(monkeypatch, 0.6 * needed)
    found = xd.tune(in_parts, data, topology="cpu:8", dims=("dp",), top=0, recompute=("nothing",))
    assert {t.configuration.microbatches for t in found.trials} == {1, 2, 4}
    best = found.best
    assert best.microbatches > 1 and f"MICROBATCHES = {best.microbatches}" in best.as_code()
    assert f"{best.microbatches} microbatches" in str(found)
    assert Tuned.from_json(found.as_json()).best == best
    expected = in_parts(lambda model: model, 1)
    step = xd.compile(in_parts(best.apply, best.microbatches))
    for _ in range(2):
        loss = step(*best.place(*data)).full_tensor().cpu()
        torch.testing.assert_close(loss, expected(*data), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_attention_alone_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short, before whole layers are; the estimate of memory is between both."""

    def attending() -> nn.Module:
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, bias=False)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    data = (torch.randn(8, 64, 64),)
    given: Any = {"topology": "cpu:8", "dims": ("dp",), "top": 0}
    plenty = xd.tune(training(attending), data, **given)
    assert [trial.configuration.recompute for trial in plenty.trials] == ["nothing"]
    have_memory(monkeypatch, 1.0)
    found = xd.tune(training(attending), data, **given)
    memory: dict[str, float] = {}
    for trial in found.trials:
        own = memory.setdefault(trial.configuration.recompute, trial.memory)
        memory[trial.configuration.recompute] = min(own, trial.memory)
    assert memory["layers"] < memory["attention"] < memory["nothing"]


@needs_gpu_compiler
def test_scores_of_attention_whose_queries_are_cut_take_time() -> None:
    """cuDNN's kernel takes a device's heads, and not its part of the queries."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 3 * 512), nn.Linear(512, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = [t.unflatten(-1, (4, 128)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]
            found = nn.functional.scaled_dot_product_attention(*split, is_causal=True)
            return self.out(found.transpose(1, 2).flatten(-2))

    def build(parallelize: Any) -> Any:
        model = parallelize(Attention().bfloat16())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    def scores(rows: int, **mesh: int) -> float:
        batch = (torch.zeros(rows, 2048, 64, dtype=torch.bfloat16),)
        found = xd.tune(build, batch, topology="h100:1x8", top=0, mesh=mesh)
        return min(trial.estimate.scores for trial in found.trials)

    pairs = 4 * 2048 * 2048 / 8
    assert scores(1, cp=8) == pytest.approx(pairs * (12 + 28) / 3.35e12, rel=0.01)
    assert scores(8, dp=8) == 0
    assert scores(2, dp=2, tp=4) == 0


@needs_gpu_compiler
def test_the_compiler_of_absent_gpus_is_asked() -> None:
    """By threads that know nothing of the `xd.abstract` block in which steps are traced."""
    found = xd.tune(build(), batch(7), topology="h100:1x8", top=2)
    assert [trial.known_by for trial in found.trials[:2]] == ["compiler"] * 2
    assert not any(trial.error for trial in found.trials)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(128, 512, bias=False) for _ in range(2))
        self.down = nn.Linear(512, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("topology", "each"),
    [("cpu:8", 2), pytest.param("h100:1x8", 1, marks=needs_gpu_compiler)],
)
def test_sums_are_as_many_as_xla_makes(topology: str, each: int, again: bool) -> None:
    """A layer's gradient is one of two products; what is computed again and not needed isn't."""

    def build(parallelize: Any) -> Any:
        model = parallelize(nn.ModuleList([Gated() for _ in range(3)]))
        layers = xd.scan_layers(model, recompute=again)

        def step(x: torch.Tensor) -> None:
            layers(x).square().mean().backward()

        return step

    columns, rows = {"tp": 0}, {"tp": 1}
    found = xd.tune(
        *(build, (torch.zeros(64, 128, requires_grad=True),)),
        topology=topology,
        mesh={"tp": 8},
        pinned={"*.up.*": columns, "*.gate.*": columns, "*.down.*": rows},
        recompute=("nothing",),
    )
    (trial,) = found.trials
    assert trial.report is not None
    moved = 3 * (1 + each) * 64 * 128 * 4
    assert trial.estimate.moved == pytest.approx(moved, rel=0.01)
    assert trial.report.collective_bytes == pytest.approx(moved, rel=0.01)


def scanned(parallelize: Any, offload: bool) -> Any:
    """A step whose layers are a loop, which keeps their inputs on the devices or on the host."""
    torch.manual_seed(0)
    model = parallelize(Model(64, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = xd.scan_layers(model.layers, offload=offload)(x)
        loss = (model.head(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_what_is_kept_may_be_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batch(16384)
    plenty = xd.tune(scanned, data, topology="cpu:8", dims=("dp",), top=0)
    assert {t.configuration.offload for t in plenty.trials} == {False}
    needed = plenty.trials[0].estimate.memory
    have_memory(monkeypatch, 0.8 * needed)
    found = xd.tune(scanned, data, topology="cpu:8", dims=("dp",), top=0, recompute=("nothing",))
    trial = max((t for t in found.trials if t.configuration.offload), key=lambda t: t.memory)
    # Each device's rows of what the six layers take.
    assert needed - trial.estimate.memory >= 6 * 16384 // 8 * 64 * 4
    away = trial.configuration
    assert "OFFLOAD = True" in away.as_code() and ", on the host" in str(found)
    assert Tuned.from_json(found.as_json()).trials == found.trials
    step, expected = xd.compile(scanned(away.apply, True)), scanned(lambda model: model, False)
    for _ in range(2):
        loss = step(*away.place(*data)).full_tensor().cpu()
        torch.testing.assert_close(loss, expected(*data), rtol=1e-4, atol=1e-5)


def test_microbatches_that_nobody_makes() -> None:
    with pytest.raises(ValueError, match=r"of a build\(parallelize, microbatches\)"):
        xd.tune(build(), batch(64), topology="cpu:8", microbatches=(1, 2))
    with pytest.raises(ValueError, match=r"microbatches=\(0,\)"):
        xd.tune(in_parts, batch(64), topology="cpu:8", microbatches=(0,))


def test_one_that_cannot_be_compiled_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers run beside each other; a refusal is that configuration's alone."""
    lowered, asked = search.lowered_plan, []

    def refusing(*args: Any, **kwargs: Any) -> Any:
        asked.append(lowered(*args, **kwargs))
        if len(asked) == 1:
            raise RuntimeError("no such instruction")
        if len(asked) == 2:

            def refused() -> Any:
                raise RuntimeError("no register is left")

            return refused
        return asked[-1]

    monkeypatch.setattr(search, "lowered_plan", refusing)
    found = xd.tune(build(), batch(64), topology="cpu:8", top=3)
    errors = [trial.error for trial in found.trials if trial.error]
    assert sorted(errors) == [
        "RuntimeError: no register is left",
        "RuntimeError: no such instruction",
    ]
    assert found.trials[0].report is not None and not found.trials[0].error
    assert not any(trial.fits for trial in found.trials if trial.error)


def test_the_next_are_compiled_where_the_best_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is one that the compiler has seen, as long as there is one."""
    lowered, asked = search.lowered_plan, []

    def refusing(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        if len(asked) < 3:
            raise TypeError("no such instruction")
        return lowered(*args, **kwargs)

    monkeypatch.setattr(search, "lowered_plan", refusing)
    found = xd.tune(build(), batch(64), topology="cpu:8", top=1)
    assert len(asked) == 3 and not found.trials[0].error and found.trials[0].report is not None
    assert [trial.error for trial in found.trials[-2:]] == ["TypeError: no such instruction"] * 2


def test_an_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if begun:
            raise KeyboardInterrupt
        begun.append(1)
        return lambda: None

    monkeypatch.setattr(search, "lowered_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        xd.tune(build(), batch(64), topology="cpu:8", top=3)
    monkeypatch.undo()
    assert xd.tune(build(), batch(64), topology="cpu:8", top=1).trials[0].report is not None


def test_several_slices_may_each_have_the_parameters_whole() -> None:
    """Between slices only ``dp`` is looked at beside what lies in them: ``fsdp`` has a slice's."""
    data = batch(64)
    found = xd.tune(build(), data, topology="cpu:4*2", top=1)
    one = xd.tune(build(), data, topology="cpu:8", top=0)
    two, whole = ({(*t.configuration.mesh.items(),): t for t in f.trials} for f in (found, one))
    assert (("dp", 2), ("fsdp", 4)) in two and not any("fsdp" in dict(mesh) for mesh in whole)
    # What goes over the slow network costs more than in one slice.
    for mesh in whole.keys() & two.keys():
        assert two[mesh].estimate.price > whole[mesh].estimate.price
    step, expected = xd.compile(build()(found.best.apply)), build()(lambda model: model)
    for _ in range(2):
        loss = step(*found.best.place(*data)).full_tensor().cpu()
        torch.testing.assert_close(loss, expected(*data), rtol=1e-4, atol=1e-5)
