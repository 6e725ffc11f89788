"""One traced and compiled form of a step."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import jaxpr_as_fun
from torch.utils import _pytree as pytree

from xla_dtensor import _context, rng
from xla_dtensor.compilation.arguments import Arguments, modules_of, training_flags
from xla_dtensor.compilation.garbage import NewObjects
from xla_dtensor.compilation.host_ops import HostOperations
from xla_dtensor.compilation.optimizers import OptimizerHooks
from xla_dtensor.compilation.trace import Guard, Number, StepTrace
from xla_dtensor.device_tensor import XLATensor
from xla_dtensor.dispatch import logical_value
from xla_dtensor.form import Form
from xla_dtensor.per_device import logical
from xla_dtensor.sharded_tensor import XLAShardedTensor
from xla_dtensor.storage import Storage


class Program:
    """One traced and compiled form of the step, valid while its guards hold."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        known_leaves: list[Any],
        executables: dict[str, Any],
        compiler_options: dict[str, Any] | None,
    ) -> None:
        self._compiler_options = compiler_options
        self.stale = False
        with_grad_at_entry = {
            id(leaf)
            for leaf in (reference() for reference in known_leaves)
            if leaf is not None and leaf.grad is not None
        }
        self._modules = modules_of(function, arguments)
        self._training = training_flags(self._modules)
        trace = StepTrace()
        hooks = OptimizerHooks(trace)
        result: dict[str, Any] = {}

        def traced() -> list[Any]:
            args, kwargs = arguments.unflatten()
            with hooks:
                out = function(*args, **kwargs)
            result["out"] = out
            del out, args, kwargs
            return self._outputs(trace, result)

        was_compiling = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            with (
                NewObjects(),
                _context.active(trace),
                HostOperations(trace),
                torch.autograd.set_multithreading_enabled(False),
                jax.enable_x64(True),
            ):
                closed = jax.make_jaxpr(traced)()
        except BaseException:
            hooks.undo()
            raise
        finally:
            torch.compiler._is_compiling_flag = was_compiling
            trace.undo()
        self._frame = trace.frame
        self._numbers: list[Number] = trace.numbers
        self._guards: list[Guard] = _unique_guards(trace.guards)
        self._settings = trace.settings
        self._random_operations = trace.random_operations_done
        self.leaf_references = [reference for reference, _ in trace.leaves.values()]
        # Whether a leaf has a .grad when the step begins matters, unless the step was seen to clear
        # it before it looked.
        self._leaves = [
            (reference, grad is not None)
            for key, (reference, grad) in trace.leaves.items()
            if not (grad is None and key in with_grad_at_entry)
        ]
        self._collect_inputs(trace, arguments, closed.consts)
        self._compile(closed, arguments, executables)
        del closed

    # --- what the trace gives ----------------------------------------------------------------

    def _outputs(self, trace: StepTrace, result: dict[str, Any]) -> list[Any]:
        """Called at the end of the trace: the arrays that the program returns."""
        trace.random_operations_done = trace.random_operations()
        self._grads: list[tuple[Any, _Template]] = []
        arrays: list[Any] = []
        self._forms: list[Form] = []

        def emit(array: Any, form: Form) -> int:
            arrays.append(form.physical(array))
            self._forms.append(form)
            return len(arrays) - 1

        flat, self._result_tree = pytree.tree_flatten(result.pop("out"))
        self._results: list[Any] = []
        for value in flat:
            if isinstance(value, XLAShardedTensor | XLATensor):
                if not trace.owns(value._storage_):
                    self._results.append(_Existing(value))
                    continue
                form = value._form if value._steps else value._storage_.form
                form = form.reduced()
                self._results.append(_Template(emit(logical_value(value), form), form))
            else:
                self._results.append(_Existing(value))
        del flat
        value = None
        for reference, before in trace.leaves.values():
            leaf = reference()
            grad = None if leaf is None else leaf.grad
            if leaf is None or grad is before:
                continue
            template = None
            if grad is not None:
                form = grad._form.reduced()
                template = _Template(emit(logical_value(grad), form), form)
            self._grads.append((reference, template))  # type: ignore[arg-type]
            leaf.grad = before
        grad = None
        gc.collect()  # what only cycles still hold isn't left behind
        self._written: list[tuple[int, int]] = []
        self._captured = sorted(
            (c for c in trace.captured if c.first_use is not None),
            key=lambda c: c.first_use,  # type: ignore[arg-type, return-value]
        )
        for position, captured in enumerate(self._captured):
            storage = captured.storage
            if captured.written and storage is not None:
                index = emit(logical(storage.array, storage.form), storage.form.reduced())
                self._written.append((position, index))
        self._made_state = any(c.fill_value is not None and c.storage for c in self._captured)
        self._left: list[tuple[Storage, int]] = []
        for storage in trace.left_behind():
            if isinstance(storage.array, jax.core.Tracer):
                form = storage.form.reduced()
                self._left.append((storage, emit(logical(storage.array, storage.form), form)))
        return arrays

    def _collect_inputs(self, trace: StepTrace, arguments: Arguments, consts: list[Any]) -> None:
        """Say for each constant of the jaxpr where its value comes from in later calls."""
        by_id: dict[int, _Source] = {}
        grads = {
            id(grad._storage_): reference
            for reference, grad in trace.leaves.values()
            if grad is not None
        }
        of_arguments = {
            id(t._storage_): i
            for i, t in enumerate(arguments.tensors)
            if isinstance(t, XLAShardedTensor | XLATensor)
        }
        donated = {position for position, _ in self._written}
        self._slots: list[_Source] = []
        for position, captured in enumerate(self._captured):
            source = _Source("state", position, donated=position in donated)
            if captured.storage is None:
                source = _Source("fill", position)
            elif id(captured.storage) in of_arguments:
                source.kind, source.what = "argument", of_arguments[id(captured.storage)]
                source.position = position
            elif id(captured.storage) in grads:
                source.kind, source.what = "grad", grads[id(captured.storage)]
                source.position = position
            by_id[id(captured.array)] = source
            self._slots.append(source)
        for tensor, array in trace.host_tensors.values():
            index = next((i for i, t in enumerate(arguments.tensors) if t is tensor), None)
            what = tensor if index is None else index
            by_id[id(array)] = _Source("host", what)
        for i, number in enumerate(self._numbers):
            by_id[id(number.array)] = _Source("number", i)
        by_id[id(trace.rng_words)] = _Source("rng", None)
        self._sources = [by_id.get(id(const), _Source("constant", const)) for const in consts]

    # --- compiling ---------------------------------------------------------------------------

    def _compile(self, closed: Any, arguments: Arguments, executables: dict[str, Any]) -> None:
        sources, captured = self._sources, self._captured
        variable = [s for s in sources if s.kind not in ("constant", "fill")]
        self._donated = [s for s in variable if s.donated]
        self._kept = [s for s in variable if not s.donated]
        order = {id(s): (0, i) for i, s in enumerate(self._donated)}
        order |= {id(s): (1, i) for i, s in enumerate(self._kept)}
        jaxpr = closed.jaxpr
        evaluate = jaxpr_as_fun

        def step(donated: list[Any], kept: list[Any]) -> list[Any]:
            inputs = (donated, kept)
            consts = []
            for source in sources:
                if source.kind == "constant":
                    consts.append(source.what)
                elif source.kind == "fill":
                    state = captured[source.what]
                    consts.append(
                        jnp.full(state.form.array_shape, state.fill_value, state.form.jax_dtype)
                    )
                else:
                    group, index = order[id(source)]
                    consts.append(inputs[group][index])
            return evaluate(jax.extend.core.ClosedJaxpr(jaxpr, consts))()

        shardings = [self._sharding(form) for form in self._forms]
        any_sharding = any(s is not None for s in shardings)
        options = {"out_shardings": shardings} if any_sharding else {}
        with jax.enable_x64(True):
            jitted = jax.jit(step, donate_argnums=0, **options)
            donated, kept = self._gather(arguments)
            lowered = jitted.lower(donated, kept)
            # A trace that came to the same program (the step's Python found state in place that an
            # earlier trace made) costs no compilation.
            text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            self.newly_compiled = text not in executables
            if self.newly_compiled:
                executables[text] = lowered.compile(self._compiler_options)
            self.compiled = executables[text]

    def _sharding(self, form: Form) -> Any:
        if form.sharding is not None or self._frame is None:
            return form.sharding
        return self._frame.replicated

    # --- running -----------------------------------------------------------------------------

    def mismatch(self, arguments: Arguments) -> str | None:
        """Why this program can't run now, or None."""
        if self.stale:
            return "the first call made state that the step now finds in place"
        for slot in self._slots:
            captured = self._captured[slot.position]
            if slot.kind != "state" or captured.storage is None:
                continue
            form = captured.storage.form
            if form is not captured.form and not _same_kind(form, captured.form):
                return f"captured state: from {captured.form!r} to {form!r}"
        for reference, had_grad in self._leaves:
            leaf = reference()
            if leaf is not None and (leaf.grad is not None) != had_grad:
                return (
                    f"the .grad of a parameter of shape {list(leaf.shape)}: from "
                    f"{'a tensor' if had_grad else 'None'} to "
                    f"{'None' if had_grad else 'a tensor'}"
                )
        if self._guards:
            values = [number.read() for number in self._numbers]
            for guard in self._guards:
                if guard.compute(values) != guard.outcome:
                    return f"the step decided {guard.text}, which holds no longer"
        if training_flags(self._modules) != self._training:
            return "a module was switched between train() and eval()"
        for read, (value, text) in self._settings.items():
            if read() != value:
                return f"{text}: from {value!r} to {read()!r}"
        return None

    def run(self, arguments: Arguments) -> Any:
        """Execute the program and put its effects in place."""
        with jax.enable_x64(True):
            donated, kept = self._gather(arguments)
            arrays = self.compiled(donated, kept)
        rng.advance(self._random_operations)
        for position, index in self._written:
            storage = self._storage_of(position, arguments)
            storage.write(arrays[index], self._placed(self._forms[index]))
        for reference, template in self._grads:
            leaf = reference()
            if leaf is not None:
                leaf.grad = None if template is None else self._tensor(template, arrays)
        for storage, index in self._left:
            storage.write(arrays[index], self._placed(self._forms[index]))
        if self._left or self._made_state:
            # The next call traces again: it finds this state in place of making it, and may come to
            # another program.
            self.stale = True
            self._left, self._made_state = [], False
        results = [
            r.value if isinstance(r, _Existing) else self._tensor(r, arrays) for r in self._results
        ]
        return pytree.tree_unflatten(results, self._result_tree)

    def _tensor(self, template: _Template, arrays: list[Any]) -> Any:
        form = self._placed(template.form)
        cls = XLATensor if form.mesh is None else XLAShardedTensor
        return cls(Storage(arrays[template.index], form), form)

    def _placed(self, form: Form) -> Form:
        """Per-device results live on all devices of the program."""
        return form.placed(self._frame)

    def _storage_of(self, position: int, arguments: Arguments) -> Storage:
        slot, captured = self._slots[position], self._captured[position]
        if slot.kind == "argument":
            return arguments.tensors[slot.what]._storage_
        if slot.kind == "grad":
            leaf = slot.what()
            if leaf is not None and leaf.grad is not None:
                return leaf.grad._storage_
        assert captured.storage is not None
        return captured.storage

    def _gather(self, arguments: Arguments) -> tuple[list[Any], list[Any]]:
        return (
            [self._fetch(source, arguments) for source in self._donated],
            [self._fetch(source, arguments) for source in self._kept],
        )

    def _fetch(self, source: _Source, arguments: Arguments) -> Any:
        if source.kind in ("state", "argument", "grad"):
            storage = self._storage_of(source.position, arguments)
            storage.place(self._frame)
            return storage.array
        if source.kind == "number":
            return np.float64(self._numbers[source.what].read())
        if source.kind == "rng":
            return rng.words()
        from xla_dtensor.transfer import to_numpy

        tensor = source.what
        if isinstance(tensor, int):
            tensor = arguments.tensors[tensor]
        return to_numpy(tensor)


class _Source:
    """Where an input of the program comes from."""

    __slots__ = ("donated", "kind", "position", "what")

    def __init__(self, kind: str, what: Any, donated: bool = False) -> None:
        self.kind = kind
        self.what = what
        self.position = what if kind in ("state", "fill") else -1
        self.donated = donated


class _Template:
    """A result that each call makes anew: output ``index`` in ``form``."""

    __slots__ = ("form", "index")

    def __init__(self, index: int, form: Form) -> None:
        self.index = index
        self.form = form


class _Existing:
    """A result that is the same object in each call."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _same_kind(a: Form, b: Form) -> bool:
    """Whether a per-device tensor only moved from one device to all of them, or back."""
    return (
        a.mesh is None
        and b.mesh is None
        and a.shape == b.shape
        and a.dtype == b.dtype
        and (a.frame is None or b.frame is None)
    )


def _unique_guards(guards: list[Guard]) -> list[Guard]:
    return list({guard.text: guard for guard in guards}.values())
