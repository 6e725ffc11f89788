"""``generate`` with nothing said about a cache: the two programs, where nobody can tell it."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="it isn't installed: make test-transformers")

from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import xla_dtensor as xd
from tests.transformers import harness
from tests.transformers.architectures import BY_NAME
from tests.transformers.test_generate import Streamer, check_streamed, counts, on_mesh, prompt
from xla_dtensor.ecosystem import transformers_generate, transformers_generate_when

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN: dict[str, Any] = {"pad_token_id": 0, "do_sample": False, "max_new_tokens": 6}


def on_device(name: str = "Llama") -> tuple[Any, Any]:
    """A model, and the same on the CPU."""
    return BY_NAME[name].make().eval().to("xla"), BY_NAME[name].make().eval()


def generated(model: Any, ids: torch.Tensor, on: str = "xla", **options: Any) -> list[list[int]]:
    moved = {k: v.to(on) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    found = model.generate(ids.to(on), **{**PLAIN, **moved})
    return harness.whole(getattr(found, "sequences", found)).tolist()


def check(model: Any, expected: Any, ids: torch.Tensor, **options: Any) -> None:
    assert generated(model, ids, **options) == generated(expected, ids, "cpu", **options)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BLOOM"])
def test_few_programs_for_prompts_of_many_lengths(name: str) -> None:
    """A prompt is padded at its end where the model is told the positions (BLOOM isn't)."""
    model, expected = on_device(name)
    for length in (1, 5, 16) if name == "BLOOM" else (1, 2, 7, 15, 16):
        mask = torch.ones(2, length, dtype=torch.long)
        check(model, expected, prompt(length), attention_mask=mask)
        if length > 2:
            mask[0, : length // 2] = 0
            check(model, expected, prompt(length) * mask, attention_mask=mask)
    prefills, _, decodes, _ = counts(model)
    assert decodes == 2  # with a mask and without one
    assert prefills == 5 if name == "BLOOM" else prefills <= 4


def test_sequences_that_end() -> None:
    model, expected = on_device()
    whole = generated(expected, prompt(6), "cpu", max_new_tokens=12)
    for eos in ([whole[0][7], whole[1][9]], [whole[0][7], 63], [whole[0][6], whole[1][6]]):
        options = {"eos_token_id": eos, "max_new_tokens": 12}
        check(model, expected, prompt(6), **options)
        check_streamed(generated, model, expected, **options)
    assert counts(model) == (1, 1, 1, 1)


def test_weights_that_have_changed_and_modes() -> None:
    model, expected = on_device()
    check(model, expected, prompt(6))
    for each in (model, expected):
        with torch.no_grad():
            each.lm_head.weight.neg_()
            each.model.layers[0].mlp = copy.deepcopy(each.model.layers[1].mlp)
    check(model, expected, prompt(6))
    with torch.inference_mode():
        check(model, expected, prompt(6, seed=1))
        check(model, expected, prompt(6, seed=2), max_new_tokens=1)
    with torch.no_grad():
        check(model, expected, prompt(6, seed=3), num_return_sequences=1)
    for each in (model, expected):
        each.to(torch.float64)
    check(model, expected, prompt(6))


def test_no_memory_is_kept() -> None:
    """Of a cache that nobody has seen."""
    for model, ids in ((on_device()[0], prompt(6)), (on_mesh(), prompt(9))):
        for _ in range(2):
            generated(model, ids)
            caches = [x for x in gc.get_objects() if type(x) is StaticCache]
            kept = [t for c in caches for layer in c.layers for t in (layer.keys, layer.values)]
            assert all(t.untyped_storage().nbytes() == 0 for t in kept)


def test_copies_and_files_have_no_programs() -> None:
    model, expected = on_device()
    check(model, expected, prompt(6))
    other = copy.deepcopy(model)
    assert counts(other) == (0, 0, 0, 0)
    check(other, expected, prompt(6))
    assert pickle.loads(pickle.dumps(model.xla_generation)).decode.compilations == 0
    assert model.state_dict().keys() == expected.state_dict().keys()


def test_buffers_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_generate, "LENGTHS", 16)
    monkeypatch.setattr(transformers_generate, "AT_FIRST", 4)
    model, expected = on_device()
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :3] = 0
    for options in ({}, {"attention_mask": mask}):
        ids = prompt(6) * options.get("attention_mask", 1)
        check(model, expected, ids, max_new_tokens=45, **options)
        seen: list[int] = []
        generated(model, ids, max_new_tokens=30, streamer=Streamer(seen), **options)
        assert len(seen) == 12 + 60 + 1
    assert model.xla_generation.decode.compilations == 6  # 16, 32, 64, with a mask or not


def test_sampling_draws_what_the_loop_draws() -> None:
    found = []
    model, _ = on_device()
    for cache in ("dynamic", None):
        torch.manual_seed(3)
        tokens = generated(model, prompt(6), do_sample=True, top_k=5, cache_implementation=cache)
        found.append((tokens, torch.rand(2, device="xla").tolist()))
        assert ("xla_generation" in vars(model)) == (cache is None)
    assert found[0] == found[1]


def test_tokens_lie_as_the_loops_do() -> None:
    """In memory of their own, so that they can be viewed in any shape."""
    for model in on_device():
        tokens = model.generate(prompt(6).to(model.device), **{**PLAIN, "max_new_tokens": 2})
        assert tokens.view(-1).shape == (16,)
        assert tokens.untyped_storage().nbytes() == tokens.nbytes


def test_dropout_that_is_kept_on_draws_what_the_loop_draws() -> None:
    """To sample by (Monte Carlo dropout): the model is in evaluation mode, and a part isn't."""
    found = []
    model, _ = on_device("GPT-2")
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.9
            part.train()
    for cache in ("dynamic", None):
        torch.manual_seed(3)
        tokens = generated(model, prompt(6), max_new_tokens=2, cache_implementation=cache)
        found.append((tokens, torch.rand(2, device="xla").tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "options",
    [
        {"disable_compile": True},
        {"cache_implementation": "dynamic"},
        {"use_cache": False},
        {"return_dict_in_generate": True, "output_scores": True},
        {"num_beams": 2},
        {"past_key_values": DynamicCache},
    ],
    ids=str,
)
def test_ways_to_transformers_loop(options: dict[str, Any]) -> None:
    model, expected = on_device()
    made = {k: v if not isinstance(v, type) else (lambda v=v: v()) for k, v in options.items()}
    found = []
    for each, on in ((model, "xla"), (expected, "cpu")):
        now = {k: v() if callable(v) else v for k, v in made.items()}
        found.append(generated(each, prompt(6), on, max_new_tokens=2, **now))
    assert found[0] == found[1] and "xla_generation" not in vars(model)


class OfTheUsers(LlamaForCausalLM):
    """A class that does something with each call."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


def test_code_of_the_users_runs_for_each_token() -> None:
    model, expected = on_device()
    calls: dict[str, int] = {"xla": 0, "cpu": 0}
    for each in (model, expected):
        count = lambda module, args, out: calls.update(
            {out.device.type: calls[out.device.type] + 1}
        )
        hook = each.lm_head.register_forward_hook(count)
        generated(each, prompt(6), each.device.type, max_new_tokens=3)
        hook.remove()
    assert calls == {"xla": 3, "cpu": 3} and "xla_generation" not in vars(model)
    model.__class__ = OfTheUsers
    check(model, expected, prompt(6), max_new_tokens=3)
    assert model.calls == 3
    model.__class__ = LlamaForCausalLM
    model.train()
    check(model, expected, prompt(6), max_new_tokens=3)
    assert "xla_generation" not in vars(model)
    model.eval()
    check(model, expected, prompt(6), max_new_tokens=3)
    assert "xla_generation" in vars(model)


class LooksAtValues(LlamaForCausalLM):
    """As transformers' own code may, where it says that it can be compiled."""

    when = "always"

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        if (self.when == "always" or input_ids.shape[1] == 1) and input_ids.sum().item() < 0:
            raise ValueError
        return super().forward(input_ids=input_ids, **kwargs)


LooksAtValues.__module__ = LlamaForCausalLM.__module__
LooksAtValues.forward.__module__ = LlamaForCausalLM.__module__


@pytest.mark.parametrize("when", ["always", "a token"])
def test_models_that_cant_be_compiled(when: str, caplog: pytest.LogCaptureFixture) -> None:
    """Are left to the loop, with its tokens and random numbers, whenever that is found out."""
    model, expected = on_device()
    model.__class__, model.when = LooksAtValues, when
    found = []
    for cache in ("dynamic", None, None):
        torch.manual_seed(3)
        seen: list[int] = []
        how = {"do_sample": True, "streamer": Streamer(seen), "cache_implementation": cache}
        tokens = generated(model, prompt(6, batch=1), max_new_tokens=3, **how)
        found.append((tokens, seen, torch.rand(2, device="xla").tolist()))
    assert found[0] == found[1] == found[2]
    check(model, expected, prompt(6), max_new_tokens=3)
    assert ".item()" in model.xla_generation.refused
    assert model.xla_generation.decode.compilations == 0


@pytest.mark.parametrize("name", ["Llama", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_on_a_mesh(name: str) -> None:
    model, expected = on_mesh(BY_NAME[name]), BY_NAME[name].make().eval()
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    check(model, expected, prompt(6) * mask, attention_mask=mask)
    check(model, expected, prompt(9)[:, 1:] * mask[:, :1])
    assert model.xla_generation.refused is None
    line = xd.init_device_mesh("xla", (2,), mesh_dim_names=("tp",))
    if harness.has_plan(BY_NAME[name]) and name == "Llama":
        model, _ = harness.by_plan(BY_NAME[name], line)
        check(model.eval(), expected, prompt(6))
        assert counts(model) == (1, 1, 1, 1)


def test_inside_of_a_compiled_step() -> None:
    model, expected = on_device()
    step = xd.compile(lambda ids: model.generate(ids, **{**PLAIN, "max_new_tokens": 3}))
    wanted = generated(expected, prompt(6), "cpu", max_new_tokens=3)
    with pytest.raises(xd.errors.DataDependentError):
        step(prompt(6).to("xla"))  # transformers looks at the mask
    check(model, expected, prompt(6), max_new_tokens=3)
    assert wanted == generated(model, prompt(6), max_new_tokens=3)


def test_versions_without_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = on_device()
    names = (*transformers_generate_when.METHODS, "_a_method_that_none_has")
    monkeypatch.setattr(transformers_generate_when, "METHODS", names)
    transformers_generate_when.cache_name.cache_clear()
    try:
        check(model, expected, prompt(6), max_new_tokens=2)
        assert "xla_generation" not in vars(model)
    finally:
        transformers_generate_when.cache_name.cache_clear()
