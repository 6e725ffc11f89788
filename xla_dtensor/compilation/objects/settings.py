"""Settings of torch and Python kept in C, and the package's switches: how to read and set each.

Those that change what every step computes are in the key of programs (`global_state.py`);
here is how to set them again. The others are compared where the step's code names what reads them.
"""

from __future__ import annotations

import calendar
import decimal
import functools
import gc
import mimetypes
import os
import random
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from threading import current_thread
from typing import Any, NamedTuple

import numpy as np
import torch

from xla_dtensor.base.config import config
from xla_dtensor.base.switches import SWITCHES
from xla_dtensor.base.torch_private import (
    default_device_context,
    find,
    saved_tensors_hooks_disabled,
    views_are_replayed,
)
from xla_dtensor.compilation.objects.places import MISSING, Place


class Setting(NamedTuple):
    """One setting.

    Attributes:
        read: gives its value.
        write: sets it to a value; None where a step can't leave another one.
        named: names in the code that tells that it may be read; none where it is in the key.
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any] | None = None
    named: frozenset[str] = frozenset()


def _default_device() -> torch.device | None:
    context = getattr(default_device_context, "device_context", None)
    return None if context is None else context.device


def _set_deterministic(value: tuple[bool, bool]) -> None:
    on, only_warns = value
    torch.use_deterministic_algorithms(on, warn_only=only_warns)


def _set_anomaly(value: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*value)


_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def of_decimal(context: decimal.Context) -> tuple[Any, ...]:
    """What a context says of results. (Its flags say what has happened.)"""
    return tuple(getattr(context, name) for name in _DECIMAL)


def _set_decimal(values: tuple[Any, ...]) -> None:
    for name, value in zip(_DECIMAL, values, strict=True):
        setattr(decimal.getcontext(), name, value)


def _numpys_rng_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return name, np.asarray(keys).tobytes(), *rest


def _signal_handlers() -> list[Any]:
    return [signal.getsignal(number) for number in sorted(signal.valid_signals())]


def _rng_state() -> bytes:
    return bytes(torch.default_generator.get_state().numpy())


SETTINGS: dict[str, Setting] = {
    "torch.is_grad_enabled()": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_default_dtype()": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device()": Setting(_default_device, torch.set_default_device),
    "torch.get_float32_matmul_precision()": Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "torch.are_deterministic_algorithms_enabled()": Setting(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    "torch.is_anomaly_enabled()": Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), _set_anomaly
    ),
    "torch.is_autocast_cache_enabled()": Setting(
        torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    ),
}


def _of_device(name: str, read: Any, write: Any, device: str, *names: str) -> None:
    SETTINGS[f"{name} on {device}"] = Setting(
        lambda: read(device), lambda value: write(device, value), frozenset(names)
    )


for _device in ("xla", "cpu"):
    _of_device("autocast", torch.is_autocast_enabled, torch.set_autocast_enabled, _device)
    # While autocast is on it is in the key; while it is off, a step may switch it on. (Each thread
    # begins with a dtype of torch's: in the key of all, it would make programs for each.)
    _of_device(
        *("autocast's dtype", torch.get_autocast_dtype, torch.set_autocast_dtype, _device),
        *("autocast", "amp", "get_autocast_dtype", "set_autocast_dtype"),
    )

for _module in (torch.backends.cudnn, torch.backends.mkldnn):
    for _name in ("enabled", "deterministic", "benchmark", "allow_tf32"):
        if _name in vars(type(_module)):
            SETTINGS[f"{_module.__name__}.{_name}"] = Setting(
                functools.partial(getattr, _module, _name),
                functools.partial(setattr, _module, _name),
                # Its own name alone counts, too: the module may be imported under another name.
                frozenset({"backends", "cudnn", "mkldnn", _name, f"_get_mkldnn_{_name}"}),
            )


def _named(text: str, read: Any, write: Any, *names: str) -> None:
    SETTINGS[text] = Setting(read, write, frozenset(names))


for _kernel in ("flash", "mem_efficient", "math", "cudnn"):
    _read, _write = f"{_kernel}_sdp_enabled", f"enable_{_kernel}_sdp"
    _named(
        f"torch.backends.cuda.{_read}()",
        getattr(torch.backends.cuda, _read),
        getattr(torch.backends.cuda, _write),
        *(_read, _write, "sdpa_kernel"),
    )
for _name in (
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
):
    _named(
        f"torch.backends.cuda.matmul.{_name}",
        functools.partial(getattr, torch.backends.cuda.matmul, _name),
        functools.partial(setattr, torch.backends.cuda.matmul, _name),
        _name,
    )
_named(
    "whether torch.distributions validates its arguments",
    functools.partial(find, "validates_distributions"),
    torch.distributions.Distribution.set_default_validate_args,
    *("distributions", "Distribution", *torch.distributions.__all__),
)
for _module, _read, _write in (
    (torch, "is_warn_always_enabled", "set_warn_always"),
    (torch, "get_num_threads", "set_num_threads"),
    (torch.backends.mha, "get_fastpath_enabled", "set_fastpath_enabled"),
    (sys, "getrecursionlimit", "setrecursionlimit"),
    *(
        (torch.__future__, f"get_{_name}", f"set_{_name}")
        for _name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion")
    ),
):
    _named(
        f"{_module.__name__}.{_read}()",
        getattr(_module, _read),
        getattr(_module, _write),
        *(_read, _write),
    )
_named("torch.initial_seed()", torch.initial_seed, None, "initial_seed")
_named("torch.get_rng_state()", _rng_state, None, "get_rng_state")
_named(
    "gc.isenabled()",
    gc.isenabled,
    lambda on: gc.enable() if on else gc.disable(),
    *("isenabled", "enable", "disable"),
)
_named("the working directory", os.getcwd, os.chdir, "getcwd", "cwd", "chdir", "abspath", "resolve")
_named(
    "decimal's context",
    lambda: of_decimal(decimal.getcontext()),
    _set_decimal,
    *("getcontext", "setcontext", "localcontext", "Decimal"),
)


def _set_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


# The filters say whether a warning is raised, or collected.
_named(
    "warnings.filters",
    lambda: list(warnings.filters),
    _set_filters,
    *("warn", "warn_explicit", "catch_warnings", "filterwarnings", "simplefilter"),
)
_named("numpy.geterr()", np.geterr, lambda on: np.seterr(**on), "geterr", "seterr", "errstate")
_named(
    "numpy.get_printoptions()",
    lambda: repr(np.get_printoptions()),
    None,
    *("get_printoptions", "printoptions", "array2string", "array_repr", "array_str"),
)
_named("random.getstate()", random.getstate, None, "getstate")
_named("numpy.random.get_state()", _numpys_rng_state, None, "get_state")

# Settings without a setter: steps may read them, and mustn't change them.
_named(
    "torch.sparse.check_sparse_tensor_invariants.is_enabled()",
    torch.sparse.check_sparse_tensor_invariants.is_enabled,
    None,
    *("check_sparse_tensor_invariants", "is_enabled"),
)
_named(
    "torch.autograd.graph.disable_saved_tensors_hooks",
    saved_tensors_hooks_disabled,
    None,
    *("saved_tensors_hooks", "save_on_cpu", "disable_saved_tensors_hooks"),
)
_named(
    "whether views are replayed",
    views_are_replayed,
    None,
    *("_is_view_replay_enabled", "_force_original_view_tracking"),
)
_named(
    "torch.utils.checkpoint.set_checkpoint_early_stop",
    functools.partial(find, "stops_checkpoints_early"),
    None,
    *("checkpoint", "checkpoint_sequential", "set_checkpoint_early_stop"),
)
_named(
    "torch.utils.deterministic.fill_uninitialized_memory",
    lambda: torch.utils.deterministic.fill_uninitialized_memory,
    None,
    "fill_uninitialized_memory",
)
_named("torch.get_printoptions()", lambda: dict(vars(find("print_options"))), None, "str", "repr")
_named("threading.current_thread().name", lambda: current_thread().name, None, "current_thread")
_named("signal.getsignal()", _signal_handlers, None, "getsignal")
_named("calendar.firstweekday()", calendar.firstweekday, None, *calendar.__all__)
_named("socket.getdefaulttimeout()", socket.getdefaulttimeout, None, "getdefaulttimeout", "socket")
_named("tempfile.tempdir", lambda: tempfile.tempdir, None, *tempfile.__all__)
_named(
    "mimetypes.types_map",
    lambda: dict(mimetypes.types_map),
    None,
    *("guess_type", "guess_extension", "guess_all_extensions", "types_map"),
)


for _name in SWITCHES:
    _named(
        f"xd.config.{_name}",
        functools.partial(getattr, config, _name),
        functools.partial(setattr, config, _name),
        _name,
    )

NAMED = frozenset().union(*(setting.named for setting in SETTINGS.values()))
"""All names that say that code may read or set one of them."""


def guards_of(names: set[str]) -> list[tuple[str, Callable[[], Any]]]:
    """The settings that code with these names may read: (name in messages, what reads it)."""
    return [
        (text, setting.read)
        for text, setting in SETTINGS.items()
        if not setting.named.isdisjoint(names)
    ]


class SettingsPlace(Place):
    """The settings that a step may leave at other values than it found.

    Args:
        names: the names in its code.
    """

    __slots__ = ("keys",)

    def __init__(self, names: set[str]) -> None:
        super().__init__(SETTINGS, "", guarded=False)
        self.keys = tuple(
            text
            for text, setting in SETTINGS.items()
            if setting.write is not None
            and (not setting.named or not setting.named.isdisjoint(names))
        )

    def content(self) -> dict[Any, Any]:
        return {text: SETTINGS[text].read() for text in self.keys}

    def replace(self, content: dict[Any, Any]) -> None:
        for text, value in content.items():
            setting = SETTINGS[text]
            if value is not MISSING and setting.write is not None and setting.read() != value:
                setting.write(value)

    def label(self, key: Any) -> str:
        return str(key)
