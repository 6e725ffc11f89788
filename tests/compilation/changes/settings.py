"""Settings, classes and flags that a step leaves at other values than it found: each call does it.

Each maker gives a function, what it leaves, and what puts that back.
"""

from __future__ import annotations

import calendar
import decimal
import gc
import logging
import mimetypes
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import xla_dtensor as xd
from tests.compilation.changes._table import Program, rows
from tests.compilation.changes._world import World

Left = tuple[Callable[..., Any], Callable[[], Any], Callable[[], Any]]


def class_attr_assigned(world: World) -> Left:
    class C:
        k = 2

    def f(x):
        C.k = 5
        return x * 2

    return f, lambda: C.k, lambda: setattr(C, "k", 2)


def class_attr_new(world: World) -> Left:
    class C:
        pass

    def f(x):
        C.zz = 5
        return x * 2

    return f, lambda: getattr(C, "zz", None), lambda: "zz" in vars(C) and delattr(C, "zz")


def class_attr_by_cls(world: World) -> Left:
    class C:
        k = 2

        @classmethod
        def setit(cls):
            cls.k = 5

    def f(x):
        C.setit()
        return x * 2

    return f, lambda: C.k, lambda: setattr(C, "k", 2)


def class_attr_by_type(world: World) -> Left:
    class C:
        k = 2

        def setit(s):
            type(s).k = 5

    c = C()

    def f(x):
        c.setit()
        return x * 2

    return f, lambda: C.k, lambda: setattr(C, "k", 2)


def class_attr_base_shadowed(world: World) -> Left:
    class B:
        k = 2

    class C(B):
        pass

    def f(x):
        C.k = 5
        return x * 2

    return f, lambda: [C.k, B.k], lambda: "k" in vars(C) and delattr(C, "k")


def class_attr_tensor(world: World) -> Left:
    class C:
        k = None

    def f(x):
        C.k = x * 3
        return x * 2

    return f, lambda: C.k, lambda: setattr(C, "k", None)


def class_setattr(world: World) -> Left:
    class C:
        k = 2

    def f(x):
        C.k = 5
        return x * 2

    return f, lambda: C.k, lambda: setattr(C, "k", 2)


def event_set(world: World) -> Left:
    e = threading.Event()

    def f(x):
        e.set()
        return x * 2

    return f, e.is_set, e.clear


def event_clear(world: World) -> Left:
    e = threading.Event()
    e.set()

    def f(x):
        e.clear()
        return x * 2

    return f, e.is_set, e.set


def function_attr(world: World) -> Left:
    def h():
        pass

    def f(x):
        h.calls = 7.0
        return x * 2

    return f, lambda: getattr(h, "calls", None), lambda: h.__dict__.clear()


def default_dtype(world: World) -> Left:
    def f(x):
        torch.set_default_dtype(torch.float64)
        return x * 2

    return f, lambda: str(torch.get_default_dtype()), lambda: torch.set_default_dtype(torch.float32)


def grad_enabled(world: World) -> Left:
    def f(x):
        torch.set_grad_enabled(False)
        return x * 2

    return f, torch.is_grad_enabled, lambda: torch.set_grad_enabled(True)


def det_algos(world: World) -> Left:
    def f(x):
        torch.use_deterministic_algorithms(True, warn_only=True)
        return x * 2

    return (
        f,
        lambda: [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        lambda: torch.use_deterministic_algorithms(False),
    )


def matmul_precision(world: World) -> Left:
    def f(x):
        torch.set_float32_matmul_precision("high")
        return x * 2

    return (
        f,
        torch.get_float32_matmul_precision,
        lambda: torch.set_float32_matmul_precision("highest"),
    )


def default_device(world: World) -> Left:
    def f(x):
        torch.set_default_device("meta")
        return x * 2

    return f, lambda: str(torch.get_default_device()), lambda: torch.set_default_device(None)


def autocast_flag(world: World) -> Left:
    def f(x):
        torch.set_autocast_enabled("cpu", True)
        return x * 2

    return (
        f,
        lambda: torch.is_autocast_enabled("cpu"),
        lambda: torch.set_autocast_enabled("cpu", False),
    )


def autocast_dtype(world: World) -> Left:
    def f(x):
        torch.set_autocast_dtype("cpu", torch.float16)
        return x * 2

    return (
        f,
        lambda: str(torch.get_autocast_dtype("cpu")),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    )


def cudnn_flag(world: World) -> Left:
    # torch's own test utilities turn it off for the process that imports them.
    vars_of_backends = torch.backends.flags_frozen.__globals__
    vars_of_backends["__allow_nonbracketed_mutation_flag"] = True

    def f(x):
        torch.backends.cudnn.benchmark = True
        return x * 2

    return (
        f,
        lambda: torch.backends.cudnn.benchmark,
        lambda: setattr(torch.backends.cudnn, "benchmark", False),
    )


def num_threads_set(world: World) -> Left:
    def f(x):
        torch.set_num_threads(3)
        return x * 2

    return f, torch.get_num_threads, lambda: torch.set_num_threads(2)


def anomaly(world: World) -> Left:
    def f(x):
        torch.autograd.set_detect_anomaly(True)
        return x * 2

    return f, torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(False)


def switch_set(world: World) -> Left:
    def f(x):
        xd.config.expert_capacity = 1.5
        return x * 2

    return (
        f,
        lambda: xd.config.expert_capacity,
        lambda: setattr(xd.config, "expert_capacity", None),
    )


def recursion_set(world: World) -> Left:
    sys.getrecursionlimit()

    def f(x):
        sys.setrecursionlimit(2345)
        return x * 2

    return f, sys.getrecursionlimit, lambda: sys.setrecursionlimit(1000)


def logger_level(world: World) -> Left:
    lg = logging.getLogger("zzl")

    def f(x):
        lg.setLevel(10)
        return x * 2

    return f, lambda: lg.level, lambda: lg.setLevel(0)


def validate_args_set(world: World) -> Left:
    from torch.distributions import Distribution

    old = Distribution._validate_args

    def f(x):
        Distribution.set_default_validate_args(not old)
        return x * 2

    return (
        f,
        lambda: Distribution._validate_args,
        lambda: Distribution.set_default_validate_args(old),
    )


def tensor_attr_class_patch(world: World) -> Left:
    def f(x):
        torch.Tensor.zzpatch = lambda s: s
        return x * 2

    return (
        f,
        lambda: hasattr(torch.Tensor, "zzpatch"),
        lambda: hasattr(torch.Tensor, "zzpatch") and delattr(torch.Tensor, "zzpatch"),
    )


def decimal_prec(world: World) -> Left:
    def f(x):
        decimal.getcontext().prec = 5
        return x * 2

    return f, lambda: decimal.getcontext().prec, lambda: setattr(decimal.getcontext(), "prec", 28)


def gc_disable(world: World) -> Left:
    def f(x):
        gc.disable()
        return x * 2

    return f, gc.isenabled, gc.enable


MAKERS: tuple[Callable[[World], Left], ...] = (
    class_attr_assigned,
    class_attr_new,
    class_attr_by_cls,
    class_attr_by_type,
    class_attr_base_shadowed,
    class_attr_tensor,
    class_setattr,
    event_set,
    event_clear,
    function_attr,
    default_dtype,
    grad_enabled,
    det_algos,
    matmul_precision,
    default_device,
    autocast_flag,
    autocast_dtype,
    cudnn_flag,
    num_threads_set,
    anomaly,
    switch_set,
    recursion_set,
    logger_level,
    validate_args_set,
    tensor_attr_class_patch,
    decimal_prec,
    gc_disable,
)


@rows({maker.__name__: maker for maker in MAKERS})
def left(world: World, make: Callable[[World], Left]) -> Program:
    """Put back after each call, it is there again after the next."""
    function, read, put_back = make(world)
    step = world.compile(function if world.changes else lambda x: x * 2)
    x = world.batch(0, (4,))
    try:
        for _ in range(4):
            out = step(x)
            seen = read()
            put_back()
            yield out, seen
    finally:
        put_back()


class Read(NamedTuple):
    """A setting that a step's Python asks for.

    Attributes:
        read: asks for it.
        change: gives it another value.
        back: gives it the value from before.
    """

    read: Callable[[], Any]
    change: Callable[[], Any]
    back: Callable[[], Any]


cuda, cudnn_by_name, mha = torch.backends.cuda, torch.backends.cudnn, torch.backends.mha
READ = {
    "kernels_of_attention": Read(
        lambda: cuda.flash_sdp_enabled(),
        lambda: cuda.enable_flash_sdp(False),
        lambda: cuda.enable_flash_sdp(True),
    ),
    "fastpath": Read(
        lambda: mha.get_fastpath_enabled(),
        lambda: mha.set_fastpath_enabled(False),
        lambda: mha.set_fastpath_enabled(True),
    ),
    "module_by_another_name": Read(
        lambda: cudnn_by_name.deterministic,
        # Not by assignment, which torch's own test utilities forbid for the process.
        lambda: torch._C._set_cudnn_deterministic(True),
        lambda: torch._C._set_cudnn_deterministic(False),
    ),
    "only_warns": Read(
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda: torch.use_deterministic_algorithms(False, warn_only=True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "autocast_cache": Read(
        torch.is_autocast_cache_enabled,
        lambda: torch.set_autocast_cache_enabled(False),
        lambda: torch.set_autocast_cache_enabled(True),
    ),
    "autocast_dtype_while_off": Read(
        lambda: torch.get_autocast_dtype("cpu") == torch.float16,
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    ),
    "conversion": Read(
        lambda: torch.__future__.get_swap_module_params_on_conversion(),
        lambda: torch.__future__.set_swap_module_params_on_conversion(True),
        lambda: torch.__future__.set_swap_module_params_on_conversion(False),
    ),
    "sparse_invariants": Read(
        lambda: torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        lambda: torch.sparse.check_sparse_tensor_invariants.enable(),
        lambda: torch.sparse.check_sparse_tensor_invariants.disable(),
    ),
    "fills_memory": Read(
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", True),
    ),
    "how_tensors_are_printed": Read(
        lambda: len(str(torch.tensor([1.23456789]))) < 15,
        lambda: torch.set_printoptions(precision=1),
        lambda: torch.set_printoptions(profile="default"),
    ),
    "name_of_the_thread": Read(
        lambda: threading.current_thread().name == "another",
        lambda: setattr(threading.current_thread(), "name", "another"),
        lambda: setattr(threading.current_thread(), "name", "MainThread"),
    ),
    "handler_of_a_signal": Read(
        lambda: signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN,
        lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        lambda: signal.signal(signal.SIGUSR2, signal.SIG_DFL),
    ),
    "first_day": Read(
        lambda: calendar.firstweekday() == 0,
        lambda: calendar.setfirstweekday(4),
        lambda: calendar.setfirstweekday(0),
    ),
    "timeout": Read(
        lambda: socket.getdefaulttimeout() is None,
        lambda: socket.setdefaulttimeout(5.0),
        lambda: socket.setdefaulttimeout(None),
    ),
    "folder_of_temporary_files": Read(
        lambda: tempfile.gettempdir() == "/elsewhere",
        lambda: setattr(tempfile, "tempdir", "/elsewhere"),
        lambda: setattr(tempfile, "tempdir", None),
    ),
    "types_of_files": Read(
        lambda: mimetypes.guess_type("a.xladtensor")[0] is None,
        lambda: mimetypes.add_type("a/b", ".xladtensor"),
        mimetypes.init,
    ),
    "validation": Read(
        lambda: torch.distributions.Distribution._validate_args,
        lambda: torch.distributions.Distribution.set_default_validate_args(False),
        lambda: torch.distributions.Distribution.set_default_validate_args(True),
    ),
}


@rows(READ)
def asked_for(world: World, setting: Read) -> Program:
    """A setting that the step reads and the user changes between calls."""
    mimetypes.init()
    step = world.compile(lambda x: x * (2 if setting.read() else 5))
    x = world.batch()
    try:
        yield step(x)
        world.change(setting.change)
        yield step(x)
    finally:
        setting.back()
    yield step(x)
