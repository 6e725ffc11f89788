"""``generate`` of Hugging Face transformers: one program a token.

transformers' own loop calls the model, and computes around it eagerly with tensors that grow by a
token each time: on xla devices a program for each length. On CUDA it lets ``torch.compile`` make
one of the model alone. Here all that a token needs is one program: the model, the logits
processors, the draw, and the writing of the token into a buffer of fixed size. What the loop can do
and this can't (`why_not`) is left to it. Nothing of transformers is copied. Read and checked in
5.23.0 and 5.24.0.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from xla_dtensor.base import ours
from xla_dtensor.base.random import rng
from xla_dtensor.ecosystem.transformers_generate_when import cache_name, static_cache, why_not
from xla_dtensor.errors import DataDependentError, UnsupportedOpError
from xla_dtensor.integration.patching.take_over import take_over

logger = logging.getLogger("xla_dtensor")

# Buffers have a multiple of this many tokens, so that few lengths have programs of their own.
LENGTHS = 128
# Those that nobody has asked for have room for so many tokens at first, and twice as many then.
AT_FIRST = 1024
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
    why = why_not(module, model, **named)
    if why is None:
        if "xla_generation" not in vars(model):
            model.xla_generation = Generation()
        generation = model.xla_generation
        cache = named.pop(name := cache_name(module))
        if isinstance(cache, module.StaticCache):
            return _generated(generation, model, name, cache, **named)
        state = rng.get_state()
        try:
            if generation.refused is None:
                return _generated(generation, model, name, static_cache(module, model), **named)
        except _Refused as refused:
            rng.set_state(state)
            generation.refused = str(refused.__cause__)
        why = generation.refused
    if why:
        logger.info(
            "xla_dtensor: generate runs transformers' loop, operation by operation: %s", why
        )
    return original(*args, **kwargs)


class _Refused(Exception):
    """Two steps that nobody has asked for can't be compiled; nothing has happened."""


class Generation:
    """The two compiled steps of a model: a prompt, which makes the cache's content, and a token.

    A copy of a model, or one read from a file, makes its own.

    Attributes:
        prefill, decode: the steps.
        refused: why they can't be compiled, if a call that hasn't asked for them has found it out.
        size: how many tokens the largest cache that was asked for has room for.
    """

    def __init__(self) -> None:
        from xla_dtensor.compilation import compile

        self.prefill = compile(_prefill, watch="trace")
        self.decode = compile(_decode, watch="trace")
        self.refused: str | None = None
        self.size = 0

    def __reduce__(self) -> Any:
        return Generation, ()


def _rounded(length: int) -> int:
    return -(-length // LENGTHS) * LENGTHS


def _padded_length(length: int) -> int:
    """Of a prompt: a power of 2 from 16 on, or a multiple of LENGTHS."""
    return _rounded(length) if length > LENGTHS else max(16, 1 << (length - 1).bit_length())


def _generated(
    steps: Generation,
    model: Any,
    cache_name: str,
    cache: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    asked = generation_config.cache_implementation is not None
    longest = stopping_criteria.max_length
    if asked:
        size = _rounded(max(longest, generation_config.max_cache_len or 0))
        size = steps.size = max(size, steps.size)  # a shorter call has the same programs
    else:
        size = _rounded(min(longest, input_ids.shape[1] + AT_FIRST))
    eos = [c.eos_token_id for c in stopping_criteria if hasattr(c, "eos_token_id")]
    on_device = lambda t: None if t is None else t.to(input_ids.device)
    how = {
        "cache": cache_name,
        "processors": [_with_inputs(processor) for processor in logits_processor],
        "sample": bool(generation_config.do_sample),
        "eos": on_device(eos[0]) if eos else None,
        "pad": on_device(generation_config._pad_token_tensor),
    }
    # A layer for a sliding window counts its tokens in Python, which would be a program for each.
    # The mask lets no token see more than the window.
    static = importlib.import_module("transformers.cache_utils").StaticLayer
    cache.layers[:] = [static(size) for _ in cache.layers]
    length = begin = input_ids.shape[1]
    decode = functools.partial(steps.decode, model, cache)
    with contextlib.nullcontext() if asked else _refusals():
        prompt = _padded(input_ids, model_kwargs)
        state, finished = steps.prefill(model, cache, *prompt, size, how)
        if not (asked or streamer is None or steps.decode.traces):
            # A streamer is told nothing before it is known that there is a next token.
            steps.decode.looked_at((model, cache, state, how), {}, lambda program: None)
    length += 1
    # A step may run before it is known whether it is the last, where nobody sees that it has: it
    # draws no random numbers.
    early = streamer is None and not how["sample"]
    # Between two tokens none of the caller's code runs but a streamer's, and what a step changes
    # is tensors alone.
    again = False
    with model._optimize_model_for_decode():
        while True:
            if streamer is not None:
                streamer.put(state["token"][:, 0].cpu())
            if length == longest or (not early and _is_true(finished)):
                break
            was = finished
            if length == size:
                size *= 2
                _grow(cache, state, size)
                again = False
            if again:
                finished = steps.decode.again()
            else:
                with _refusals() if length == begin + 1 and not asked else contextlib.nullcontext():
                    finished = decode(state, how)
                again = streamer is None
            if early and _is_true(was):
                break
            length += 1
    if streamer is not None:
        streamer.end()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            # The steps keep the arguments of their last call.
            tensor.untyped_storage().resize_(0)
    # As the loop's: in a row, and without what the buffer has room for.
    return state["ids"][:, :length].contiguous()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What can't be compiled is left to transformers' loop."""
    try:
        yield
    except (DataDependentError, UnsupportedOpError) as error:
        raise _Refused from error


def _padded(ids: torch.Tensor, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A prompt as the first step takes it: with few lengths, and its true one. What is added lies
    behind the prompt, where no token of it looks (models that generate are causal), and what comes
    next is written over it."""
    length = ids.shape[1]
    more = _padded_length(length) - length
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    # Without positions the model makes its own, which may end with the prompt.
    if positions is None or more == 0:
        return ids, kwargs, None
    kwargs = dict(kwargs)
    last = positions[..., -1:]
    kwargs["position_ids"] = torch.cat([positions, last.expand(*last.shape[:-1], more)], -1)
    if mask is not None:
        kwargs["attention_mask"] = torch.nn.functional.pad(mask, (0, more), value=1)
    return torch.nn.functional.pad(ids, (0, more)), kwargs, ids.new_full((1,), length)


def _grow(cache: Any, state: dict[str, Any], size: int) -> None:
    """Give the buffers room for ``size`` tokens."""
    pad = torch.nn.functional.pad
    for layer in cache.layers:
        more = size - layer.max_cache_len
        layer.keys, layer.values = (pad(x, (0, 0, 0, more)) for x in (layer.keys, layer.values))
        layer.max_cache_len = size
    more = size - state["ids"].shape[1]
    state["ids"] = pad(state["ids"], (0, more))
    if (mask := state["kwargs"].get("attention_mask")) is not None:
        state["kwargs"]["attention_mask"] = pad(mask, (0, more), value=1)


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
    model: Any,
    cache: Any,
    ids: torch.Tensor,
    kwargs: dict[str, Any],
    length: torch.Tensor | None,
    size: int,
    how: Any,
) -> Any:
    """Take a prompt in; the state of the tokens to come, and whether all of them are there."""
    batch, padded = ids.shape
    given = dict(kwargs)
    if length is not None and "logits_to_keep" in given:
        given["logits_to_keep"] = length - 1
    inputs = model.prepare_inputs_for_generation(
        ids, is_first_iteration=True, **{how["cache"]: cache}, **given
    )
    logits = model(**inputs, return_dict=True).logits
    if length is None:
        length = ids.new_full((1,), padded)
    else:
        if logits.shape[1] > 1:
            logits = logits.index_select(1, length - 1)
        for layer in cache.layers:
            layer.cumulative_length.copy_(length[0])
    unfinished = None if how["eos"] is None else ids.new_ones(batch)
    token, unfinished, finished = _next(logits[:, -1], unfinished, how)
    state = {"token": token, "unfinished": unfinished, "kwargs": dict(kwargs), "at": length + 0}
    filled = torch.cat([ids, ids.new_zeros((batch, size - padded))], 1)
    state["ids"] = filled.index_copy(1, length, token)
    if (mask := kwargs.get("attention_mask")) is not None:
        # What comes later is there for the tokens that come later.
        ones = mask.new_ones((batch, size - padded))
        state["kwargs"]["attention_mask"] = torch.cat([mask, ones], 1)
    if (positions := kwargs.get("position_ids")) is not None:
        state["kwargs"]["position_ids"] = positions[..., -1:] + 1
    return state, finished


def _decode(model: Any, cache: Any, state: dict[str, Any], how: Any) -> Any:
    """One token more, written into the state; whether all are there."""
    kwargs, token = state["kwargs"], state["token"]
    inputs = model.prepare_inputs_for_generation(
        token, next_sequence_length=1, **{how["cache"]: cache}, **kwargs
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
