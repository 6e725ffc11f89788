"""An entry of ``op_db`` through the TPU's compiler: its program for chips that aren't here.

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
from tests.conformance.layouts import Distributor, fresh, map_leaves, tensors
from tests.conftest import make_mesh
from xla_dtensor.compilation import CompiledStep
from xla_dtensor.compilation.looking import looked_at
from xla_dtensor.errors import XlaDTensorError
from xla_dtensor.plan.planning import not_kept

FORMS = ("forward", "backward")
NAMED = "named"
"""The class of what raises an error of ours; XLA's own are `ERROR`, as the end of the process."""

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
        its forms with their classes, "pass", `NAMED` or "error".
    """
    result = Result(entries.full_name(entry))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's samples use what torch deprecates
        for number, sample in enumerate(entries.samples(entry, dtype, limit)):
            result.samples += 1
            with xd.abstract(topology) as there, not_kept(there.topology):
                _Sample(entry, dtype, make_mesh(mesh), sample, number, result, whole).run()
    return result


class _Place:
    """Where one of the step's arguments goes in a call."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Sample:
    def __init__(
        self,
        entry: Any,
        dtype: torch.dtype,
        mesh: Any,
        sample: Any,
        number: int,
        result: Result,
        whole: bool,
    ) -> None:
        self.entry, self.number, self.result = entry, number, result
        self.grad = entries.differentiable(entry, dtype)
        self.process = sample.output_process_fn_grad or (lambda out: out)
        plain = fresh((sample.input, tuple(sample.args), dict(sample.kwargs)), self.grad)
        self.text = describe(plain)[:300]
        seed = f"{result.name} {tuple(mesh.shape)} {number} 0"
        to_mesh = Distributor(mesh, seed, whole)
        if entries.ON_HOST.fullmatch(result.name):
            call = (to_mesh(plain[0]), *plain[1:])
        else:
            call = to_mesh(plain)
        self.layout = to_mesh.layouts
        self.given: list[torch.Tensor] = []
        self.places = map_leaves(call, self._place)
        self.grad = self.grad and any(t.requires_grad for t in self.given)

    def _place(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "xla":
            return leaf
        known = [i for i, other in enumerate(self.given) if other is leaf]
        if not known:
            known = [len(self.given)]
            self.given.append(leaf)
        return _Place(known[0])

    def run(self) -> None:
        self.result.layouts.append("; ".join(self.layout))
        both = "backward" if self.grad else "forward"
        if self._compiles(both):
            self.result.forms.setdefault("forward", PASS)
        elif self.grad:
            self._compiles("forward")

    def _compiles(self, form: str) -> bool:
        """Whether there is a program; of ``"backward"`` it has both."""
        try:
            with jax.enable_x64(True):
                looked_at(CompiledStep(self._step(form)), self.given, {}, _compiled)
        except Exception as error:
            kind = NAMED if isinstance(error, XlaDTensorError) else ERROR
            self.result.forms[form] = kind
            text = f"{type(error).__name__}: {error}"[:600]
            failure = {"form": form, "class": kind, "sample": self.number, "call": self.text}
            self.result.failures.append({**failure, "layouts": self.layout, "text": text})
            return False
        self.result.forms.setdefault(form, PASS)
        return True

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
    program.lowered.compile(QUICK)
