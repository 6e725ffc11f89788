"""``generate`` of Hugging Face transformers with a static cache: one program a token.

transformers' own loop calls the model, and computes around it eagerly with tensors that grow by a
token each time: on xla devices a program for each length. On CUDA it lets ``torch.compile`` make
one of the model alone. Here all that a token needs is one program: the model, the logits
processors, the draw, and the writing of the token into a buffer of fixed size. What the loop can do
and this can't (`_why_not`) is left to it. Nothing of transformers is copied. Read and checked in
5.23.0.
"""

from __future__ import annotations

import copy
import dis
import functools
import importlib
import logging
from typing import Any

import torch

from xla_dtensor.base import ours
from xla_dtensor.integration.patching.take_over import take_over

logger = logging.getLogger("xla_dtensor")

# Buffers have a multiple of this many tokens, so that few lengths have programs of their own.
LENGTHS = 128
# What the loop gives to the model besides the cache.
KNOWN = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
# The layers of a cache that are tensors, or can be.
LAYERS = ("StaticLayer", "StaticSlidingWindowLayer")

# Attributes of logits processors that requests set, and that only meet tensors.
NUMBERS = ("temperature", "top_p", "min_p")


def install(module: Any) -> None:
    """When ``transformers.generation.utils`` is imported."""
    function = getattr(module.GenerationMixin, "_sample", None)
    if function is not None:
        take_over(function, functools.partial(_sample, module))


def _sample(module: Any, original: Any, args: Any, kwargs: Any) -> Any:
    model, ids = args[0], args[1] if len(args) > 1 else kwargs.get("input_ids")
    named = {**kwargs, "input_ids": ids}
    if len(args) > 2 or not ours.is_ours(ids):
        return original(*args, **kwargs)
    why = _why_not(module, model, **named)
    if why is None:
        return _generated(model, **named)
    if why:
        logger.info(
            "xla_dtensor: generate runs transformers' loop, operation by operation: %s", why
        )
    return original(*args, **kwargs)


def _why_not(
    module: Any,
    model: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> str | None:
    """Why transformers' own loop has to run; "" where the user has asked for it."""
    cache, mixin = model_kwargs.get("past_key_values"), module.GenerationMixin
    if generation_config.disable_compile or not isinstance(cache, module.StaticCache):
        return ""
    if getattr(cache, "_is_user_defined", False):
        return "the cache is the caller's"
    kinds = {type(layer).__name__ for layer in cache.layers} - set(LAYERS)
    if kinds:
        return f"a cache with layers of {', '.join(sorted(kinds))}"
    if model.config.is_encoder_decoder:
        return "an encoder and a decoder"
    for name in (
        "_update_model_kwargs_for_generation",
        "prepare_inputs_for_generation",
        "_prefill",
    ):
        if getattr(type(model), name) is not getattr(mixin, name):
            return f"{type(model).__name__} has a {name} of its own"
    others = [n for n, v in model_kwargs.items() if n not in KNOWN and v is not None]
    if others:
        return f"the model is given {', '.join(others)}"
    if synced_gpus or generation_config.prefill_chunk_size is not None:
        return "synced_gpus or prefill_chunk_size"
    if generation_config.return_dict_in_generate:
        return "return_dict_in_generate"
    for name in [type(c).__name__ for c in stopping_criteria]:
        if name not in ("MaxLengthCriteria", "EosTokenCriteria"):
            return f"the stopping criterion {name}"
    for processor in logits_processor:
        if _uses_tokens(type(processor)):  # type: ignore[arg-type]
            return f"{type(processor).__name__} looks at all tokens that there are"
    return None


@functools.lru_cache(256)
def _uses_tokens(cls: Any) -> bool:
    """Whether a logits processor's code names its first argument, the tokens so far, or takes
    more than these and the scores."""
    code = cls.__call__.__code__
    names = code.co_varnames[: code.co_argcount]
    return len(names) != 3 or names[1] in [step.argval for step in dis.get_instructions(code)]


class Generation:
    """The two compiled steps of a model: a prompt, which makes the cache's content, and a token."""

    def __init__(self) -> None:
        from xla_dtensor.compilation import compile

        self.prefill = compile(_prefill)
        self.decode = compile(_decode)


def _generated(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    if "xla_generation" not in vars(model):
        model.xla_generation = Generation()
    steps = model.xla_generation
    cache = model_kwargs.pop("past_key_values")
    known = getattr(model, "_previous_max_cache_length", 0), generation_config.max_cache_len or 0
    longest = max(stopping_criteria.max_length, *(1 + length for length in known))
    eos = [c.eos_token_id for c in stopping_criteria if hasattr(c, "eos_token_id")]
    on_device = lambda t: None if t is None else t.to(input_ids.device)
    how = {
        "processors": [_with_inputs(processor) for processor in logits_processor],
        "sample": bool(generation_config.do_sample),
        "eos": on_device(eos[0]) if eos else None,
        "pad": on_device(generation_config._pad_token_tensor),
    }
    size = -(-longest // LENGTHS) * LENGTHS
    # A layer for a sliding window counts its tokens in Python, which would be a program for each.
    # The mask lets no token see more than the window.
    full = next((x.max_cache_len for x in cache.layers if not x.is_sliding), size)
    static = importlib.import_module("transformers.cache_utils").StaticLayer
    cache.layers[:] = [static(full) if x.is_sliding else x for x in cache.layers]
    state, finished = steps.prefill(model, cache, input_ids, model_kwargs, size, how)
    begin = input_ids.shape[1]
    length = begin + 1
    # A step may run before it is known whether it is the last, where nobody sees that it has: it
    # draws no random numbers.
    early = streamer is None and not how["sample"]
    decode = functools.partial(steps.decode, model, cache, state, how)
    # Between two tokens none of the caller's code runs but a streamer's, and what a step changes
    # is tensors alone.
    next_one = steps.decode.again if streamer is None else decode
    with model._optimize_model_for_decode():
        while True:
            if streamer is not None:
                streamer.put(state["token"][:, 0].cpu())
            if length == stopping_criteria.max_length or (not early and _is_true(finished)):
                break
            was = finished
            finished = decode() if length == begin + 1 else next_one()
            if early and _is_true(was):
                break
            length += 1
    if streamer is not None:
        streamer.end()
    return state["ids"][:, :length]


def _with_inputs(processor: Any) -> Any:
    """A logits processor whose numbers that requests set are tensors, and so inputs of a program:
    transformers' code asks for the types of numbers, which makes those constants. Tensors of no
    dims on the CPU count as numbers in torch."""
    numbers = {n: v for n, v in vars(processor).items() if n in NUMBERS and type(v) is float}
    if not numbers:
        return processor
    other = copy.copy(processor)
    vars(other).update({n: torch.tensor(v, dtype=torch.float64) for n, v in numbers.items()})
    return other


def _is_true(finished: torch.Tensor | None) -> bool:
    return finished is not None and bool(finished)


def _prefill(
    model: Any, cache: Any, ids: torch.Tensor, kwargs: dict[str, Any], size: int, how: Any
) -> Any:
    """Take a prompt in; the state of the tokens to come, and whether all of them are there."""
    batch, length = ids.shape
    inputs = model.prepare_inputs_for_generation(
        ids, past_key_values=cache, is_first_iteration=True, **kwargs
    )
    logits = model(**inputs, return_dict=True).logits[:, -1]
    unfinished = None if how["eos"] is None else ids.new_ones(batch)
    token, unfinished, finished = _next(logits, unfinished, how)
    state = {"token": token, "unfinished": unfinished, "kwargs": dict(kwargs)}
    filled = torch.cat([ids, token, ids.new_zeros((batch, size - length - 1))], 1)
    state["ids"], state["at"] = filled, ids.new_full((1,), length)
    if (mask := kwargs.get("attention_mask")) is not None:
        # What comes later is there for the tokens that come later.
        ones = mask.new_ones((batch, size - length))
        state["kwargs"]["attention_mask"] = torch.cat([mask, ones], 1)
    if (positions := kwargs.get("position_ids")) is not None:
        state["kwargs"]["position_ids"] = positions[..., -1:] + 1
    return state, finished


def _decode(model: Any, cache: Any, state: dict[str, Any], how: Any) -> Any:
    """One token more, written into the state; whether all are there."""
    kwargs, token = state["kwargs"], state["token"]
    inputs = model.prepare_inputs_for_generation(
        token, next_sequence_length=1, past_key_values=cache, **kwargs
    )
    logits = model(**inputs, return_dict=True).logits[:, -1]
    new, unfinished, finished = _next(logits, state["unfinished"], how)
    state["at"].add_(1)
    state["ids"].index_copy_(1, state["at"], new)
    token.copy_(new)
    if unfinished is not None:
        state["unfinished"].copy_(unfinished)
    if (positions := kwargs.get("position_ids")) is not None:
        positions.add_(1)
    return finished


def _next(logits: torch.Tensor, unfinished: Any, how: Any) -> Any:
    """The next token of each sequence, [batch, 1]; which go on; whether none does."""
    scores = logits.float()
    for processor in how["processors"]:
        scores = processor(None, scores)
    if how["sample"]:
        token = torch.multinomial(torch.softmax(scores, -1), 1)
    else:
        token = scores.argmax(-1, keepdim=True)
    if unfinished is None:
        return token, None, None
    going = unfinished[:, None]
    token = token * going + how["pad"] * (1 - going)
    unfinished = unfinished & ~torch.isin(token[:, 0], how["eos"])
    return token, unfinished, unfinished.max() == 0
