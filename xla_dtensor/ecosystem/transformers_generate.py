"""``generate`` of Hugging Face transformers with a static cache: one program a token.

transformers' own loop calls the model, and computes around it eagerly with tensors that grow by a
token each time: on xla devices a program for each length. On CUDA it lets ``torch.compile`` make one
of the model alone. Here all that a token needs is one program: the model, the logits processors, the
draw, and the writing of the token into a buffer of fixed size. What the loop can do and this can't
(`_why_not`) is left to it. Nothing of transformers is copied. Read and checked in 5.23.0.
"""

from __future__ import annotations

import dis
import functools
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
# The numbers that would have to be kept of each token.
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def install(module: Any) -> None:
    """When ``transformers.generation.utils`` is imported."""
    function = getattr(module.GenerationMixin, "_sample", None)
    if function is not None:
        take_over(function, functools.partial(_sample, module))


def _sample(module: Any, original: Any, args: Any, kwargs: Any) -> Any:
    model, ids = args[0], args[1] if len(args) > 1 else kwargs.get("input_ids")
    named = {**kwargs, **dict(zip(("input_ids",), args[1:], strict=False))}
    if len(args) > 2 or not ours.is_ours(ids):
        return original(*args, **kwargs)
    why = _why_not(module, model, **named)
    if why is None:
        return _generated(model, **named)
    if why:
        logger.info("xla_dtensor: generate runs transformers' loop, operation by operation: %s", why)
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
    if model.config.is_encoder_decoder:
        return "an encoder and a decoder"
    for name in ("_update_model_kwargs_for_generation", "prepare_inputs_for_generation", "_prefill"):
        if getattr(type(model), name) is not getattr(mixin, name):
            return f"{type(model).__name__} has a {name} of its own"
    others = [n for n, v in model_kwargs.items() if n not in KNOWN and v is not None]
    if others:
        return f"the model is given {', '.join(others)}"
    if synced_gpus or generation_config.prefill_chunk_size is not None:
        return "synced_gpus or prefill_chunk_size"
    if generation_config.return_dict_in_generate:
        return "return_dict_in_generate"
    kinds = {c: type(c).__name__ for c in stopping_criteria}
    for criterion, name in kinds.items():
        if name not in ("MaxLengthCriteria", "EosTokenCriteria"):
            return f"the stopping criterion {name}"
    for processor in logits_processor:
        if _uses_tokens(type(processor)):
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
    steps = model.__dict__.setdefault("xla_generation", Generation())
    cache = model_kwargs.pop("past_key_values")
    longest = max([stopping_criteria.max_length, *(1 + x.max_cache_len for x in cache.layers)])
    eos = [c.eos_token_id for c in stopping_criteria if hasattr(c, "eos_token_id")]
    on_device = lambda t: None if t is None else t.to(input_ids.device)
    how = {
        "processors": list(logits_processor),
        "sample": bool(generation_config.do_sample),
        "eos": on_device(eos[0]) if eos else None,
        "pad": on_device(generation_config._pad_token_tensor),
    }
    size = -(-longest // LENGTHS) * LENGTHS
    state, finished = steps.prefill(model, cache, input_ids, model_kwargs, size, how)
    begin = input_ids.shape[1]
    length = begin + 1
    # A step may run before it is known whether it is the last, where nobody sees that it has: it
    # draws no random numbers.
    early = streamer is None and not how["sample"]
    with model._optimize_model_for_decode():
        while True:
            if streamer is not None:
                streamer.put(state["token"][:, 0].cpu())
            if length == stopping_criteria.max_length or (not early and _is_true(finished)):
                break
            was = finished
            finished = steps.decode(model, cache, state, how)
            if early and _is_true(was):
                break
            length += 1
    if streamer is not None:
        streamer.end()
    return state["ids"][:, :length]


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
