"""Whether a call of transformers' ``generate`` may run as two compiled steps, and if not, why.

With a static cache the user has asked for steps that are compiled. Where transformers has chosen
the cache itself (``cache_implementation=None``: one that grows) the two steps must not be told from
its loop but by the time they take: so the code that runs is transformers', torch's or peft's, whose
``forward`` does nothing but compute, and nobody looks on (hooks, modes). Read and checked in 5.23.0
and 5.24.0; in a version that lacks what is used here (`cache_name`) transformers' loop runs.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private import (
    count_of_dispatch_modes,
    count_of_function_modes,
    function_mode_at,
)
from xla_dtensor.base.torch_private.attributes import forward_hooks_of, global_forward_hooks

# What the loop gives to the model besides the cache.
KNOWN = ("attention_mask", "position_ids", "use_cache", "logits_to_keep")
# What the cache is called, from 5.24 on and before.
CACHE = ("cache", "past_key_values")
# The layers of a cache that are tensors, or can be.
LAYERS = ("StaticLayer", "StaticSlidingWindowLayer")
# The methods of models that the steps call, or do the work of.
METHODS = ("_update_model_kwargs_for_generation", "prepare_inputs_for_generation", "_prefill")
# Whose code does nothing but compute, when a model's ``forward`` runs.
COMPUTE = ("torch", "transformers", "peft", "xla_dtensor")


def why_not(
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
    """Why transformers' own loop has to run; "" where the user has asked for it.

    Args:
        module: ``transformers.generation.utils``.
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus,
            streamer, model_kwargs: the arguments of ``_sample``.
    """
    name, mixin = cache_name(module), module.GenerationMixin
    cache = model_kwargs.pop(name, None)
    if generation_config.disable_compile or cache is None:
        return ""
    if model.config.is_encoder_decoder:
        return "an encoder and a decoder"
    if getattr(cache, "_is_user_defined", False):
        return "the cache is the caller's"
    if not isinstance(cache, module.StaticCache):
        if type(cache) is not module.DynamicCache or generation_config.cache_implementation:
            return ""
        why = _why_not_alike(module, model, generation_config, logits_processor)
        if why is not None:
            return why
        cache = static_cache(module, model)
    kinds = {type(layer).__name__ for layer in cache.layers} - set(LAYERS)
    if kinds:
        return f"a cache with layers of {', '.join(sorted(kinds))}"
    for name in METHODS:
        if getattr(type(model), name) is not getattr(mixin, name) or name in vars(model):
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
    if stopping_criteria.max_length is None:
        return "no max_length"
    for processor in logits_processor:
        if _uses_tokens(type(processor)):  # type: ignore[arg-type]
            return f"{type(processor).__name__} looks at all tokens that there are"
    return None


def static_cache(module: Any, model: Any) -> Any:
    """transformers' static cache for a model, of one token."""
    return module.StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=1)


@functools.lru_cache(1)
def cache_name(module: Any) -> str:
    """What the loop calls the cache; "" in a version of transformers that lacks what the steps
    use."""
    mixin = module.GenerationMixin
    if not all(hasattr(mixin, name) for name in (*METHODS, "_optimize_model_for_decode")):
        return ""
    takes = inspect.signature(mixin.prepare_inputs_for_generation).parameters
    if not {"is_first_iteration", "next_sequence_length"} <= takes.keys():
        return ""
    return next((name for name in CACHE if name in takes), "")


def _why_not_alike(
    module: Any, model: Any, generation_config: Any, logits_processor: Any
) -> str | None:
    """Why the user could tell two compiled steps, which weren't asked for, from the loop."""
    if not executor.current().has_values:
        return "inside of a compiled step or a plan"
    if generation_config.is_assistant:
        return "the model is an assistant"
    if not model._can_compile_fullgraph:
        return f"transformers says that {type(model).__name__} can't be compiled"
    for name, part in model.named_modules():
        if part.training:  # dropout kept on, to sample by: padded prompts draw more numbers
            return f"{name or 'the model'} is in training mode"
    functions = map(function_mode_at, range(count_of_function_modes()))
    if count_of_dispatch_modes() or not all(_computes(type(mode)) for mode in functions):
        return "a mode of torch's that looks at operations"
    for each in (*map(type, logits_processor), *_code(model)):
        if not _computes(each):
            name = getattr(each, "__qualname__", each)
            return f'it would run code of {each.__module__} ({name}): cache_implementation="static"'
    return None


def _code(model: Any) -> Iterator[Any]:
    """The classes and functions that are called when a model is."""
    yield from global_forward_hooks()
    for module in model.modules():
        yield type(module)
        yield vars(module).get("forward", type(module).forward)
        yield from forward_hooks_of(module)
    attention = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    yield from filter(None, [attention.get(model.config.get_text_config()._attn_implementation)])


def _computes(what: Any) -> bool:
    """Whether a class or a function is of those whose code does nothing but compute."""
    from xla_dtensor.compilation.step.base_step import BaseStep

    if isinstance(what, BaseStep):
        return True  # the user has compiled it
    while isinstance(what, functools.partial):
        what = what.func
    return str(getattr(what, "__module__", "")).partition(".")[0] in COMPUTE


@functools.lru_cache(256)
def _uses_tokens(cls: Any) -> bool:
    """Whether a logits processor's code names its first argument, the tokens so far, or takes
    more than these and the scores."""
    code = cls.__call__.__code__
    names = code.co_varnames[: code.co_argcount]
    return len(names) != 3 or names[1] in [step.argval for step in dis.get_instructions(code)]
