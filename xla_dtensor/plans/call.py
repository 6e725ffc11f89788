"""`Call`: an overload's arguments as tensors, numbers that may vary, and a hashable key."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from xla_dtensor.base import executor, host_memory
from xla_dtensor.base.dtypes import to_torch_dtype
from xla_dtensor.base.numbers.python_numbers import is_number, like_a_number
from xla_dtensor.base.numbers.row_counts import Met, is_count
from xla_dtensor.base.random import rng
from xla_dtensor.base.random.generator import stream_of
from xla_dtensor.base.torch_private import FakeTensor
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution.interfaces import Slot
from xla_dtensor.forms.form import Form, device_form
from xla_dtensor.forms.views import leave_open
from xla_dtensor.plans.ops import DROPPED, OpInfo
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

_slot = functools.cache(Slot)


class Call:
    """One call of an overload.

    Attributes:
        key: what decides how it is executed; hashable.
        leaves: tensors (ours or the CPU's) and dynamic numbers, in order.
        forms: per leaf its `Form`, or the Python type of a number.
        args, kwargs: the arguments with each leaf replaced by its `Slot`.
        stream: where random numbers come from.
    """

    __slots__ = ("args", "forms", "info", "key", "kwargs", "leaves", "meta_kwargs", "stream")

    def __init__(self, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> None:
        self.info = info
        self.stream = rng.default
        self.leaves: list[Any] = []
        self.forms: list[Any] = []
        key: list[Any] = [info]
        if info.may_contract:
            key.append(torch.get_float32_matmul_precision())
        if info.makes_like:
            key.append(host_memory.of_states())
        default_dtype = torch.get_default_dtype()
        if default_dtype is not torch.float32:
            key.append(default_dtype)  # the dtype of factories' results, and of divisions of ints
        if info.lowering is not None and info.lowering.has_position:
            args = _with_position(args)
        self.args = tuple(self._take_all(info.argument_names, args, key))
        self.kwargs, self.meta_kwargs = {}, {}
        for name, value in kwargs.items():
            if name in DROPPED:
                self._check_dropped(name, value)
                if name == "memory_format" and value is not None:
                    # It changes only the strides that torch's meta kernel gives.
                    key.append(value)
                    self.meta_kwargs["memory_format"] = value
                continue
            key.append(name)
            self.kwargs[name] = self._take(value, name, key)
        self.key = tuple(key)
        if info.converted_arguments:
            self._check_converted()

    def _check_converted(self) -> None:
        """Raise as torch does for a number that the dtype of the elements doesn't have: 300 for
        ``uint8``."""
        info = self.info
        given = {**dict(zip(info.argument_names, self.args, strict=False)), **self.kwargs}
        numbers = [fill(given.get(name), self.leaves) for name in info.converted_arguments]
        odd = [
            number
            for number in numbers
            if type(number) is complex
            or (type(number) in (int, float) and not 0 <= number < _SMALL)
        ]
        dtype = self.kwargs.get("dtype")
        if odd and dtype is None:
            first = next((form for form in self.forms if isinstance(form, Form)), None)
            if first is None:
                return  # a factory, which infers the dtype from the number
            dtype = to_torch_dtype(first.jax_dtype)
            if "clamp" in info.name and not dtype.is_floating_point and float in map(type, numbers):
                dtype = torch.get_default_dtype()  # the dtype of its result
        for number in odd:
            torch.full((), number, dtype=dtype)

    def _take_all(self, names: Iterable[str], values: Iterable[Any], key: list[Any]) -> list[Any]:
        """Several values. Most are tensors, numbers that are part of the key, and None; these are
        done here, as a call for each would take longer than all else."""
        leaves, forms, static = self.leaves, self.forms, self.info.static_arguments
        taken: list[Any] = []
        for name, value in zip(names, values):  # noqa: B905  (fewer values)
            cls = type(value)
            if cls is XLAShardedTensor or cls is XLATensor:
                if value._steps:
                    taken.append(self._take_view(value, value._steps, key))
                    continue
                form = value._storage_.form
                key.append(form)
                taken.append(_slot(len(leaves)))
                leaves.append(value)
                forms.append(form)
            elif value is None:
                key.append(None)
                taken.append(None)
            elif cls is int and name in static:
                key.append(value)
                key.append(cls)
                taken.append(value)
            else:
                taken.append(self._take(value, name, key))
        return taken

    def _take(self, value: Any, name: str, key: list[Any]) -> Any:
        cls = type(value)
        if cls is XLAShardedTensor or cls is XLATensor:
            steps = value._steps
            if not steps:
                form = value._storage_.form
                key.append(form)
                return self._leaf(value, form)
            return self._take_view(value, steps, key)
        if value is None or cls is str or cls is torch.dtype:
            key.append(value)
            return value
        if cls is _Position:
            key.append(cls)
            return self._leaf(int(value), int)
        if cls is TracedPosition:
            key.append(_Position)
            return self._leaf(value.number, int)
        if cls is list or cls is tuple:
            if {*map(type, value)} == _INTEGERS and name in self.info.static_arguments:
                key.append(tuple(value))
                return list(value)
            key.append(len(value))
            return self._take_all(itertools.repeat(name), value, key)
        if cls is float or cls is int or cls is complex:
            if name in self.info.dynamic_arguments and (
                -_BOUND <= value < _BOUND
                if cls is int
                else cls is float or self.info.lowering is not None
            ):
                key.append(cls)
                return self._leaf(value, cls)
            # Constants also where the number can't be an input: ints above 64 bits, and complex
            # numbers in torch's decompositions, which have no symbolic ones.
            key.append(value or repr(value))  # 0.0 equals -0.0
            key.append(cls)
            return value
        if cls is bool:
            key.append(cls)
            key.append(value)
            return value
        if isinstance(value, torch.Tensor):
            return self._take_foreign(value, key)
        if isinstance(value, torch.SymFloat | torch.SymInt):
            if is_count(value):
                raise Met
            number_type = float if isinstance(value, torch.SymFloat) else int
            if name in self.info.dynamic_arguments or self._may_be_traced(value, name):
                key.append(number_type)
                return self._leaf(value, number_type)
            number = number_type(value)
            key.append(number)
            key.append(number_type)
            return number
        key.append(value)
        return value

    def _take_view(self, value: Any, steps: Any, key: list[Any]) -> Any:
        """A view: of one that is only read, the position is an input, and where it lies no matter.
        What is written goes through its steps; a view of it has them, and lies somewhere."""
        form = value._form
        if self.info.view is not None:
            # Without positions in a trace: the key outlives it, and would keep its tracers alive.
            key.append(steps if executor.trace() is None else leave_open(steps)[0])
        else:
            if form.offset:
                form = form.at_start()
            if self.info.mutated:  # where a write goes depends on the storage's form, too
                key.append(leave_open(steps)[0])
                key.append(value._storage_.form)
        key.append(form)
        return self._leaf(value, form)

    def _may_be_traced(self, value: Any, name: str) -> bool:
        """Whether a symbolic number, which eagerly would be part of the executable, needn't be."""
        if name not in self.info.symbolic_arguments or not is_number(value):
            return False
        assert self.info.lowering is not None
        is_static = self.info.lowering.static_scalars
        return not callable(is_static) or not is_static(name, like_a_number(value))

    def _take_foreign(self, value: torch.Tensor, key: list[Any]) -> Any:
        """A plain CPU tensor joins as if it were the same on every device."""
        if is_ours(value):
            return self._take_view(value, value._steps, key)
        if isinstance(value, FakeTensor):
            raise UnsupportedOpError(
                f"{self.info.name}: torch.compile and torch.export trace with FakeTensors, which "
                "can't be combined with xla tensors: XLA is the compiler of those, by "
                "xla_dtensor.compile(function); export the module on the CPU, module.cpu()"
            )
        # A user's subclass has the memory of a plain one, unless it computes operations itself.
        plain = type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if value.device.type != "cpu" or not plain:
            raise UnsupportedOpError(
                f"{self.info.name}: a {type(value).__name__} on {value.device} can't be combined "
                "with xla tensors; move it with .to('xla') or distribute_tensor first"
            )
        # `copy_` from a CPU leaf is fine: its gradient is moved back to the CPU.
        if torch.is_grad_enabled() and self.info.name != "aten::copy_.default":
            refuse_cpu_leaf(self.info.name, value)
        form = device_form(None, tuple(value.shape), dtype=value.dtype)
        key.append(form)
        return self._leaf(value, form)

    def described(self) -> str:
        """The operation and its tensors as a text that is the same in all processes."""
        tensors = [str(form) for form in self.forms if isinstance(form, Form)]
        given = [_written(value) for value in self.args]
        given += [f"{name}={_written(value)}" for name, value in self.kwargs.items()]
        return f"{self.info.name}({', '.join(given)}) of {'; '.join(tensors)}"

    def filled_with(self) -> Any:
        """The number that a factory of constant tensors fills its tensor with; None for others."""
        filled = _FILLED_WITH.get(self.info.name)
        return None if filled is None else filled(self)

    def _leaf(self, value: Any, form: Form | type) -> Slot:
        self.leaves.append(value)
        self.forms.append(form)
        return _slot(len(self.leaves) - 1)

    def _check_dropped(self, name: str, value: Any) -> None:
        if name == "generator" and value is not None:
            self.stream = stream_of(value, self.info.name)
        if name == "device" and value is not None:
            trace = executor.trace()
            device = torch.device(value)
            refuse_other_device(self.info.name, device)
            if device.type == "meta" and trace is None:
                raise UnsupportedOpError(
                    f"{self.info.name}: device='meta' from an xla tensor; make it with torch.empty"
                )


def view_key(info: OpInfo, args: Any) -> Any:
    """A key of a view that is said by numbers, as nearly all are, without taking the call apart:
    that would take longer than to make the view. None of others.

    What is a view of exactly what it is given is so of each tensor.
    """
    base = args[0]
    if info.is_identity:
        return info if is_ours(base) else None
    cls = type(base)
    if cls is not XLAShardedTensor and cls is not XLATensor:
        return None
    steps = base._steps
    key = [info, base._form, steps] if steps else [info, base._storage_.form]
    for value in args[1:]:
        if value is None or type(value) is int:
            key.append(value)
        elif type(value) is list and {*map(type, value)} == _INTEGERS:
            key.append(tuple(value))
        else:
            return None
    return tuple(key)


def _written(value: Any) -> str:
    if isinstance(value, Slot):
        return f"#{value.index}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    # Objects by their class: their repr may have an address, which differs between processes.
    return str(value) if isinstance(value, _PLAIN) else type(value).__name__


_BOUND = 2**63
_INTEGERS = {int}
_SMALL = 128  # numbers below it are in every dtype's range
_PLAIN = (bool, int, float, complex, str, torch.dtype, type(None))


class _Position(int):
    """A number that is an input of the executable."""


class TracedPosition:
    """The same of a number that is an input of the compiled step that is being traced."""

    def __init__(self, number: Any) -> None:
        self.number = number


def _with_position(args: Any) -> Any:
    """The arguments of ``select_backward`` or ``slice_backward`` with the position as an input, as
    `PositionStep` has it of the view. In a compiled step it is the number that it is."""
    grad, sizes, dim, start = args[:4]
    trace = executor.trace()
    if trace is not None and trace.positions is not None:
        return trace.positions.in_backward(args)
    if type(start) is not int or start < 0 or trace is not None:
        return args
    if len(args) == 4:
        return grad, sizes, dim, _Position(start)
    end, step = args[4:]
    form, dim = grad._form, dim % len(sizes)
    if type(end) is not int or step != 1 or not 0 < start < end < sizes[dim]:
        return args
    if form.dim_axes[dim]:
        return args
    return grad, sizes, dim, _Position(start), _Position(end), step


def refuse_other_device(name: str, device: torch.device) -> None:
    """Raise for ``xla:3``, of which only ``xla:0`` would be remembered."""
    if device.type == "xla" and device.index:
        raise UnsupportedOpError(
            f"{name}: there is no device {device}. All devices of the process are one to torch, "
            "'xla' or 'xla:0'; which of them hold what is said by a mesh and placements "
            "(distribute_tensor, or a mesh of one device: DeviceMesh('xla', [3]))"
        )


def refuse_cpu_leaf(name: str, tensor: torch.Tensor | None) -> None:
    """Raise for a CPU tensor whose gradient would arrive on the xla device.

    torch's autograd engine aborts with an internal assertion there.
    """
    if tensor is not None and tensor.device.type == "cpu" and tensor.requires_grad:
        raise UnsupportedOpError(
            f"{name}: a CPU tensor that requires grad ({list(tensor.shape)}) can't be combined "
            "with xla tensors, because its gradient would be on the xla device; move it with "
            ".to('xla') or distribute_tensor first"
        )


def fill(template: Any, leaves: Any) -> Any:
    """``template`` with each `Slot` replaced by its leaf."""
    cls = type(template)
    if cls is Slot:
        return leaves[template.index]
    if cls is list:
        return [fill(item, leaves) for item in template]
    return template


_FILLED_WITH: dict[str, Any] = {
    "aten::empty.memory_format": lambda call: 0,
    "aten::empty_like.default": lambda call: 0,
    "aten::zeros.default": lambda call: 0,
    "aten::zeros_like.default": lambda call: 0,
    "aten::new_zeros.default": lambda call: 0,
    "aten::ones.default": lambda call: 1,
    "aten::ones_like.default": lambda call: 1,
    "aten::full.default": lambda call: fill(call.args[1], call.leaves),
    "aten::full_like.default": lambda call: fill(call.args[1], call.leaves),
}
