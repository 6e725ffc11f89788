"""Tensors that a function uses without being given them: found, and replaced by others.

A branch or the body of a loop may use what it has closed over: a module's parameters, values of the
compiled step around it. In JAX's program these have to be arguments, so that gradients come to
them. A mode of torch's sees every tensor that a function of torch is called with, wherever it was
kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import torch
from torch.overrides import TorchFunctionMode

from xla_dtensor.base import executor
from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.torch_private import pytree, unseen
from xla_dtensor.compilation.scan.autocasts import Autocast
from xla_dtensor.compilation.trace.doubles import body_of
from xla_dtensor.compilation.trace.host_reads import BACKWARD
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.jax_programs import differentiated
from xla_dtensor.jax_programs.differentiated import plain_form
from xla_dtensor.jax_programs.functions import FunctionOnTensors
from xla_dtensor.tensors.of_form import is_ours, new_tensor


class CapturingFunction(FunctionOnTensors):
    """A torch function, as code on its arguments and on the tensors that it has captured.

    Args:
        function: is called with ``args``.
        args: arrays.
        captured: the tensors from outside that it uses.
        arrays: their values.
        autocast: what is in force where torch code calls it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        captured: Sequence[torch.Tensor],
        arrays: Sequence[Any],
        autocast: Autocast,
    ) -> None:
        super().__init__(self._replaced, args, {})
        self._own, self._captured, self._autocast = function, captured, autocast
        self._replacing: _Replacing | None = None
        self.arrays += arrays

    def wants_gradient(self, index: int) -> bool | None:
        count = len(self._at)
        return None if index < count else self._captured[index - count].requires_grad

    def within(self, tensors: Sequence[torch.Tensor]) -> _Replacing:
        """Also around a backward pass, in which a checkpoint computes again."""
        self._replacing = _Replacing(
            dict(zip(map(id, self._captured), tensors[len(self._at) :], strict=True))
        )
        return self._replacing

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        count = len(self._at)
        before = [t._storage_.version for t in tensors]
        outs = super().run(tensors[:count])
        for i, (tensor, version) in enumerate(zip(tensors, before, strict=True)):
            if tensor._storage_.version != version:
                _refuse_write(tensor, "an argument" if i < count else "a tensor from outside")
        return outs

    def _replaced(self, *args: Any) -> Any:
        assert self._replacing is not None
        # The hooks of a checkpoint around it, or of `fully_shard`, are told of the operation.
        own_hooks = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
        with self._autocast.again(), own_hooks:
            found = self._own(*args)
        with unseen():
            return pytree.tree_map(self._replacing.of, found)

    def __call__(self, words: Any = None) -> Any:
        """The results, of arrays."""
        arrays, self.arrays = self.arrays, []
        with jax.enable_x64(True):
            results = differentiated.call(self, words, list(map(jnp.asarray, arrays)))
        return self.put_together(results)


def _as_it_is(tensor: Any) -> Any:
    return tensor


class _Replacing(TorchFunctionMode):
    """A block in which functions of torch are given other tensors in place of some.

    A branch in a branch is traced by itself: what it captures is found there first, and is given to
    it by the outer one.
    """

    def __init__(self, others: dict[int, torch.Tensor]) -> None:
        self._others = others
        self._trace: Any = None
        self._around: _Replacing | None = None

    def __enter__(self) -> Any:
        self._trace = executor.current()
        self._trace.in_body = True
        _functions.enter()
        self._around, _functions.innermost = _functions.innermost, self
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        _functions.innermost = self._around
        _functions.leave()

    def of(self, value: Any) -> Any:
        return self._others.get(id(value), value)

    def of_all(self, values: Any) -> Any:
        """The arguments of a call, with the others in place of those that are replaced."""
        if executor.current() is not self._trace:
            return values
        return pytree.tree_map(self.of, values)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, named = self.of_all((args, kwargs or {}))
        if func in BACKWARD:  # a checkpoint computes again in it, of what is captured
            TorchFunctionMode.__enter__(self)
            try:
                return body_of(func)(*given, **named)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)
        if args and given[0] is not args[0]:
            if func == _GRADIENT:
                return self.of(func(*args))
            if getattr(func, "__name__", None) in _CHANGING:
                _refuse_write(args[0], "a tensor from outside")
        return func(*given, **named)


_GRADIENT = torch.Tensor.grad.__get__
# What changes a tensor otherwise than in its value (`x.grad = y` is a call of ``__set__``).
_CHANGING = frozenset(
    {
        *("__set__", "__delete__", "requires_grad_", "retain_grad"),
        *("register_hook", "register_post_accumulate_grad_hook"),
    }
)


class _Functions(threading.local):
    """``autograd.Function.apply``, which torch's modes aren't told of, while there are such blocks.

    Attributes:
        innermost: the thread's innermost block.
    """

    innermost: _Replacing | None = None
    _lock = threading.Lock()
    _blocks = 0  # of all threads
    _before: ClassVar[list[Any]] = []  # the class method that torch has

    def enter(self) -> None:
        with _Functions._lock:
            if not _Functions._blocks:
                self._before[:] = [vars(torch.autograd.Function)["apply"]]
                torch.autograd.Function.apply = classmethod(self._apply)
            _Functions._blocks += 1

    def leave(self) -> None:
        with _Functions._lock:
            _Functions._blocks -= 1
            if not _Functions._blocks:
                torch.autograd.Function.apply = self._before[0]

    @staticmethod
    def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        block = _functions.innermost
        if block is not None:
            args, kwargs = block.of_all((args, kwargs))
        return _Functions._before[0].__func__(cls, *args, **kwargs)


_functions = _Functions()


class _Finding(_Replacing):
    """Likewise: in place of every tensor from outside one of its shape; these are noted."""

    def __init__(self) -> None:
        super().__init__({})
        self.found: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        if id(value) in self._others:
            return self._others[id(value)]
        if not is_ours(value) or executor.current().owns(value._storage_):
            return value
        array = jnp.zeros(value.shape, to_jax_dtype(value.dtype))
        other = new_tensor(array, plain_form(array)).requires_grad_(value.requires_grad)
        self.found.append(value)
        self._others[id(value)] = other
        return other


def captured_by(
    function: Callable[..., Any], args: Sequence[Any], words: Any
) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors from outside that ``function`` uses, each once, and shapes of its results.

    Args:
        args: tensors, in whose place it gets others of their shapes.
        words: the state of random numbers that it may draw, or None.
    """
    finding = _Finding()

    def found(*args: Any) -> Any:
        with finding:
            return pytree.tree_map(finding.of, function(*args))

    def traced(arrays: Any) -> Any:
        code = FunctionOnTensors(found, arrays, {})
        given, code.arrays = code.arrays, []
        return differentiated.call(code, words, given)

    with jax.enable_x64(True):
        shapes = jax.eval_shape(traced, [_shape(x) for x in args])
    for tensor in finding.found:
        with unseen():  # by blocks around this one
            gradient = finding.of(tensor).grad
        if gradient is not None:
            raise UnsupportedOpError(
                "backward() in a branch or the body of a loop of a compiled step reaches a tensor "
                f"from outside, of shape {list(tensor.shape)}: take the gradient by "
                f"torch.autograd.grad and return it{user_line()}"
            )
    return finding.found, shapes


def _shape(tensor: torch.Tensor) -> Any:
    return jax.ShapeDtypeStruct(tuple(tensor.shape), to_jax_dtype(tensor.dtype))


def _refuse_write(tensor: torch.Tensor, what: str) -> None:
    raise UnsupportedOpError(
        f"a branch or the body of a loop writes to {what}, of shape {list(tensor.shape)}: in a "
        f"compiled step it must return what changes (x + 1, or x.clone() first){user_line()}"
    )
