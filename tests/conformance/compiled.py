"""An entry of ``op_db`` through the compiler of TPUs or GPUs: its program for absent chips.

Nothing is computed. Samples are laid out as in `check`, forward and backward are one program.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import jax
import torch

import xla_dtensor as xd
from tests.conformance import entries
from tests.conformance.check import Result, describe
from tests.conformance.compare import ERROR, PASS
from tests.conformance.compiled_eager import compile_launches
from tests.conformance.expected import reason
from tests.conformance.layouts import Distributor, fresh, map_leaves, tensors
from tests.conftest import make_mesh
from xla_dtensor.compilation import CompiledStep
from xla_dtensor.errors import DataDependentError, XlaDTensorError
from xla_dtensor.runtime import abstract
from xla_dtensor.runtime.program_cache import not_kept

FORMS = ("forward", "backward")
EAGER, NAMED = "eager", "named"
CLASSES = (PASS, EAGER, NAMED, ERROR)
"""From best to worst: values decide, so there is no step, but the programs of an eager call
compile; an error of ours; an error of XLA's, or the end of the process."""

# What a program costs is of no interest, only whether there is one.
QUICK = {"exec_time_optimization_effort": -1.0}


def compile_entry(
    entry: Any, dtype: torch.dtype, topology: str, mesh: str, limit: int, whole: bool = False
) -> Result:
    """Compile an entry's programs, forward and backward, without running them.

    Args:
        entry: of ``op_db``.
        dtype: of its samples.
        topology: for which devices, ``"v5e:2x4"``.
        mesh: the shape of the mesh, as `make_mesh` takes it.
        limit: how many samples; each is laid out as `check_entry` does it.
        whole: whether tensors are replicated instead.

    Returns:
        its forms with their classes, of `CLASSES`; none where CPU torch doesn't take the samples.
    """
    result = Result(entries.full_name(entry))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's samples use what torch deprecates
        for number, sample in enumerate(entries.samples(entry, dtype, limit)):
            result.samples += 1
            _Sample(entry, dtype, sample, number, result).run(topology, mesh, whole)
    return result


class _Place:
    """Where one of the step's arguments goes in a call."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Sample:
    def __init__(
        self, entry: Any, dtype: torch.dtype, sample: Any, number: int, result: Result
    ) -> None:
        self.entry, self.number, self.result = entry, number, result
        self.grad = entries.differentiable(entry, dtype)
        self.process = sample.output_process_fn_grad or (lambda out: out)
        self.call = fresh((sample.input, tuple(sample.args), dict(sample.kwargs)), self.grad)
        self.layout: list[str] = []

    def run(self, topology: str, mesh: str, whole: bool) -> None:
        if not self._is_one():
            return
        try:
            try:
                self._step_compiles(topology, mesh, whole)
            except DataDependentError:
                self._launches_compile(topology, mesh, whole)
        except Exception as error:
            self._failed("forward", error)

    def _step_compiles(self, topology: str, mesh: str, whole: bool) -> None:
        with xd.abstract(topology), not_kept(), jax.enable_x64(True):
            self._lay_out(make_mesh(mesh), whole)
            look = lambda form: CompiledStep(self._step(form)).looked_at(self.given, {}, _compiled)
            if not self.grad:
                look("forward")
                self._note("forward", PASS)
                return
            try:
                look("backward")
            except DataDependentError:
                raise
            except Exception as error:
                self._failed("backward", error)
                look("forward")
            else:
                self._note("backward", PASS)
            self._note("forward", PASS)

    def _launches_compile(self, topology: str, mesh: str, whole: bool) -> None:
        self._lay_out(make_mesh(mesh), whole)
        step = self._step("backward" if self.grad else "forward")
        compile_launches(lambda: step(*self.given), topology)
        for form in FORMS[: 1 + self.grad]:
            self._note(form, EAGER)

    def _is_one(self) -> bool:
        """Whether CPU torch takes the sample (jiterators are CUDA's alone)."""
        call = fresh(self.call, False)
        try:
            self.entry(call[0], *call[1], **call[2])
        except Exception:
            return False
        return True

    def _lay_out(self, mesh: Any, whole: bool) -> None:
        seed = f"{self.result.name} {tuple(mesh.shape)} {self.number} 0"
        to_mesh = Distributor(mesh, seed, whole)
        self.layout = to_mesh.layouts
        if entries.ON_HOST.fullmatch(self.result.name):
            call = (to_mesh(self.call[0]), *self.call[1:])
        else:
            call = to_mesh(self.call)
        self.given: list[torch.Tensor] = []
        self.places = map_leaves(call, self._place)
        self.grad = self.grad and any(t.requires_grad for t in self.given)
        self.result.layouts.append("; ".join(self.layout))

    def _place(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "xla":
            return leaf
        known = [i for i, other in enumerate(self.given) if other is leaf]
        if not known:
            known = [len(self.given)]
            self.given.append(leaf)
        return _Place(known[0])

    def _note(self, form: str, kind: str) -> None:
        forms = self.result.forms
        forms[form] = max(kind, forms.get(form, PASS), key=CLASSES.index)

    def _failed(self, form: str, error: Exception) -> None:
        expected = reason(self.result.name, form, "float32") is not None
        kind = NAMED if expected or isinstance(error, XlaDTensorError) else ERROR
        self._note(form, kind)
        text = f"{type(error).__name__}: {error}"[:600]
        failure = {"form": form, "class": kind, "sample": self.number, "text": text}
        call = describe(self.call)[:300]
        self.result.failures.append({**failure, "call": call, "layouts": self.layout})

    def _step(self, form: str) -> Any:
        def forward(*args: torch.Tensor) -> Any:
            put = lambda leaf: args[leaf.index] if isinstance(leaf, _Place) else leaf
            first, others, named = map_leaves(self.places, put)
            return self.entry(first, *others, **named)

        def step(*args: torch.Tensor) -> Any:
            with mock.patch("torch.manual_seed"):  # some entries set one themselves
                out = forward(*args)
            if form == "forward":
                return tensors(out)
            results = [t for t in tensors(self.process(out)) if t.requires_grad]
            sources = [t for t in args if t.requires_grad]
            if not results:  # of this sample there is nothing to differentiate
                return tensors(out)
            # Of one as a seed XLA would know too much.
            seeds = [t.detach() for t in results]
            found = torch.autograd.grad(results, sources, seeds, allow_unused=True)
            return [t.detach() for t in tensors(out)], [t for t in found if t is not None]

        return step


def _compiled(program: Any) -> None:
    program.lowered.compile(abstract.compiler_options(QUICK))
