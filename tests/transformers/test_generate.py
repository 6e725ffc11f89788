"""``generate`` with a static cache: a program for the prompt, one for a token, torch's tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="it isn't installed: make test-transformers")

from transformers import StaticCache

import xla_dtensor as xd
from tests.transformers import harness
from tests.transformers.architectures import BY_NAME

pytestmark = pytest.mark.filterwarnings("ignore")
STATIC: dict[str, Any] = {"cache_implementation": "static", "pad_token_id": 0, "do_sample": False}
LLAMA = BY_NAME["Llama"]
# What a program isn't made for anew: calls of this many tokens together fit.
LONGEST = {"max_cache_len": 40}


def on_mesh(architecture: Any = LLAMA) -> Any:
    mesh = xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("dp", "tp"))
    return xd.parallel.shard_by_size(architecture.make(), mesh, least=256).eval()


def prompt(length: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (batch, length), generator=generator)


def generated(model: Any, ids: torch.Tensor, on: str = "xla", **options: Any) -> list[list[int]]:
    moved = {k: v.to(on) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    found = model.generate(ids.to(on), **{**STATIC, **LONGEST, "max_new_tokens": 6, **moved})
    return harness.whole(found).tolist()


def check(model: Any, expected: Any, ids: torch.Tensor, **options: Any) -> None:
    wanted = generated(expected, ids, "cpu", **options)
    assert generated(model, ids, **options) == wanted


def counts(model: Any) -> tuple[int, int, int, int]:
    steps = model.xla_generation
    return (
        *(steps.prefill.compilations, steps.prefill.traces),
        *(steps.decode.compilations, steps.decode.traces),
    )


def test_a_program_for_the_prompt_and_one_for_a_token() -> None:
    model, expected = on_mesh(), LLAMA.make().eval()
    check(model, expected, prompt(6))
    assert counts(model) == (1, 1, 1, 1)
    check(model, expected, prompt(6, seed=1), max_new_tokens=9)
    assert counts(model) == (1, 1, 1, 1)
    check(model, expected, prompt(9))
    check(model, expected, prompt(9, seed=1), max_new_tokens=1)
    check(model, expected, prompt(16))
    assert counts(model)[0] <= 2 and counts(model)[2:] == (1, 1)
    check(model, expected, prompt(17))
    assert counts(model)[0] <= 3 and counts(model)[2:] == (1, 1)
    before = counts(model)
    check(model, expected, prompt(6, batch=3))
    assert counts(model) == tuple(count + 1 for count in before)
    check(model, expected, prompt(6))
    assert counts(model) == tuple(count + 1 for count in before)


def test_prompts_padded_at_the_left() -> None:
    model, expected = on_mesh(), LLAMA.make().eval()
    for empty in (2, 3):
        mask = torch.ones(2, 6, dtype=torch.long)
        mask[0, :empty] = 0
        check(model, expected, prompt(6) * mask, attention_mask=mask)
    assert counts(model) == (1, 1, 1, 1)


def test_weights_that_have_changed() -> None:
    model, expected = on_mesh(), LLAMA.make().eval()
    check(model, expected, prompt(6))
    before = generated(model, prompt(6))
    for trained, on in ((model, "xla"), (expected, "cpu")):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        for _ in range(2):
            ids = prompt(6, seed=2).to(on)
            trained(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    check(model, expected, prompt(6))
    assert generated(model, prompt(6)) != before
    assert model.xla_generation.decode.compilations == 1


def test_sequences_that_end() -> None:
    """Each at its own place, with padding behind; all together before the longest."""
    model, expected = on_mesh(), LLAMA.make().eval()
    whole = generated(expected, prompt(6), "cpu", max_new_tokens=12)
    ends = [whole[0][7], whole[1][9]]
    for eos in (ends, ends[:1], [whole[0][6], whole[1][6]]):
        options = {"eos_token_id": eos, "max_new_tokens": 12}
        check(model, expected, prompt(6), **options)
        check_streamed(generated, model, expected, **options)


class Streamer:
    def __init__(self, kept: list[int], stop: int = 1000) -> None:
        self.kept, self.stop = kept, stop

    def put(self, tokens: torch.Tensor) -> None:
        self.kept += tokens.flatten().tolist()
        if len(self.kept) > self.stop:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.kept.append(-1)


def check_streamed(generated: Any, model: Any, expected: Any, **options: Any) -> None:
    """A streamer is told the same tokens."""
    seen: list[list[int]] = [[], []]
    for kept, used, on in ((seen[0], expected, "cpu"), (seen[1], model, "xla")):
        generated(used, prompt(6), on, streamer=Streamer(kept), **options)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"temperature": 0.7, "top_k": 0}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8, "top_k": 0}, marks=pytest.mark.slow),
        {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=str,
)
def test_sampling_draws_what_the_loop_draws(how: dict[str, Any]) -> None:
    """And leaves the generator where it would, on one device as on four."""
    found = []
    for model in (on_mesh(), LLAMA.make().eval().to("xla")):
        for disabled in (False, True):
            torch.manual_seed(3)
            options = {"do_sample": True, "disable_compile": disabled, **how}
            tokens = generated(model, prompt(6), **options)
            found.append((tokens, torch.rand(2, device="xla").tolist()))
        assert counts(model) == (1, 1, 1, 1)
    assert all(each == found[0] for each in found)
    assert generated(model, prompt(6), do_sample=True, **how) != found[0][0]


def test_another_temperature_is_an_input() -> None:
    model = on_mesh()
    for temperature in (0.5, 0.7, 0.9, 1.1):
        generated(model, prompt(6), do_sample=True, temperature=temperature)
    assert counts(model) == (1, 1, 1, 1)


def test_what_looks_at_all_tokens_is_left_to_transformers() -> None:
    model, expected = on_mesh(), LLAMA.make().eval()
    check(model, expected, prompt(6), repetition_penalty=1.5)
    check(model, expected, prompt(6), no_repeat_ngram_size=2)
    assert "xla_generation" not in vars(model)
    model.forward = xd.compile(model.forward)
    check(model, expected, prompt(6), num_beams=2)
    check(model, expected, prompt(6), num_beams=2)
    assert model.forward.compilations <= 3


@pytest.mark.parametrize("name", ["Mistral", pytest.param("Gemma 2", marks=pytest.mark.slow)])
def test_a_sliding_window(name: str) -> None:
    """Is passed by what is generated; transformers' layers for it count in Python."""
    model, expected = on_mesh(BY_NAME[name]), BY_NAME[name].make().eval()
    assert expected.config.sliding_window == 8
    check(model, expected, prompt(5), max_new_tokens=8)
    check(model, expected, prompt(10), max_new_tokens=4)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    check(model, expected, prompt(10) * mask, attention_mask=mask)
    assert model.xla_generation.decode.compilations == 2


def test_bfloat16() -> None:
    """Each token is the best, or as good but for rounding, by CPU torch's logits."""
    model, expected = on_mesh().bfloat16(), LLAMA.make().eval().bfloat16()
    found = torch.tensor(generated(model, prompt(6)))
    logits = expected(found).logits[:, 5:-1].float()
    drawn = logits.gather(-1, found[:, 6:, None])[..., 0]
    assert (logits.amax(-1) - drawn).max() <= 0.05 * logits.abs().max()
    assert torch.equal(found[:, :6], prompt(6))


def test_models_have_programs_of_their_own() -> None:
    model, expected = on_mesh(), LLAMA.make().eval()
    check(model, expected, prompt(6))
    other, others = copy.deepcopy(model), copy.deepcopy(expected)
    for each in (other, others):
        with torch.no_grad():
            each.lm_head.weight.neg_()
    check(other, others, prompt(6))
    check(model, expected, prompt(6))
    assert counts(model)[::2] == counts(other)[::2] == (1, 1)


def test_an_interrupt() -> None:
    model, expected = on_mesh(), LLAMA.make().eval()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            generated(model, prompt(6), streamer=Streamer([], stop=16))
        check(model, expected, prompt(6))


def test_a_cache_of_the_callers() -> None:
    """Is left to transformers' loop: used, and after a reset."""
    model, expected = on_mesh(), LLAMA.make().eval()
    ours, theirs = (StaticCache(m.config, max_cache_len=40) for m in (model, expected))
    options = {"cache_implementation": None, "max_cache_len": None}
    for _ in range(2):
        wanted = generated(expected, prompt(6), "cpu", past_key_values=theirs, **options)
        assert generated(model, prompt(6), past_key_values=ours, **options) == wanted
        ours.reset()
        theirs.reset()
    model.forward = xd.compile(model.forward)
    wanted = generated(expected, prompt(6), "cpu", past_key_values=theirs, **options)
    assert generated(model, prompt(6), past_key_values=ours, **options) == wanted
