"""Runs one entry of ``op_db`` in all its forms on sharded tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy import stats
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from tests.conformance import entries
from tests.conformance.compare import (
    CLASSES,
    PASS,
    WRONG,
    Mismatch,
    as_exact,
    classify,
    compare,
    plain,
)
from tests.conformance.layouts import Distributor, fresh, in_double, tensors

FORMS = ("forward", "backward", "method", "inplace", "out", "alias")
SEED = 1234
DRAWS = 60


@dataclass
class Result:
    """What became of an entry: per form the worst class, or nothing where it has no such form.

    Attributes:
        more_exact: how many results were outside of torch's tolerance of CPU torch's, but as close
            to what CPU torch computes in double precision.
    """

    name: str
    forms: dict[str, str] = field(default_factory=dict)
    layouts: list[str] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    more_exact: int = 0

    def note(self, form: str, kind: str) -> None:
        worst = max(kind, self.forms.get(form, PASS), key=CLASSES.index)
        self.forms[form] = worst


class SkippedError(Exception):
    """CPU torch has no such form of a sample."""


def check_entry(
    entry: Any,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    limit: int,
    variants: int = 1,
    forms: Sequence[str] = FORMS,
) -> Result:
    """Compare an entry with CPU torch in ``forms``: up to ``limit`` samples, each in ``variants``
    layouts."""
    result = Result(entries.full_name(entry))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's samples use what torch deprecates
        for number, sample in enumerate(entries.samples(entry, dtype, limit)):
            result.samples += 1
            for variant in range(variants):
                _Sample(entry, dtype, mesh, sample, number, variant, result, forms).run()
    return result


class _Sample:
    def __init__(
        self,
        entry: Any,
        dtype: torch.dtype,
        mesh: DeviceMesh,
        sample: Any,
        number: int,
        variant: int,
        result: Result,
        forms: Sequence[str],
    ) -> None:
        self.forms = forms
        self.entry, self.dtype, self.mesh, self.sample = entry, dtype, mesh, sample
        self.number, self.variant, self.result = number, variant, result
        self.call = (sample.input, tuple(sample.args), dict(sample.kwargs))
        self.seed = f"{result.name} {tuple(mesh.shape)} {number} {variant}"
        self.random = bool(entries.RANDOM.fullmatch(result.name))
        self.values = not self.random and not entries.UNDEFINED.fullmatch(result.name)
        if self.random and entries.SOMETIMES_RANDOM.fullmatch(result.name):
            self.values = not self._draws()
        self.tolerance = entries.tolerance(entry, dtype)

    def _draws(self) -> bool:
        """Whether CPU torch's result depends on the seed (some entries set one themselves)."""
        seed = torch.manual_seed
        results = []
        for other in range(4):
            with mock.patch("torch.manual_seed", lambda number, by=other: seed(number + by)):
                try:
                    results.append(tensors(self._cpu(self.entry, fresh(self.call, False))))
                except SkippedError:
                    return False
        same = lambda a, b: torch.allclose(a, b, equal_nan=True)
        return not all(all(map(same, results[0], other)) for other in results[1:])

    def run(self) -> None:
        entry, first = self.entry, self.number == 0 and self.variant == 0
        self._form("forward", self.forward)
        if entries.differentiable(entry, self.dtype) and not self.random:
            self._form("backward", self.backward)
        if entry.method_variant is not None and first:
            self._form("method", lambda: self.forward(entry.method_variant))
        if entry.inplace_variant is not None and not self.sample.broadcasts_input:
            self._form("inplace", self.inplace)
        if entry.supports_out:
            self._form("out", self.out)
        if first:
            self._form("alias", self.alias)

    def _form(self, form: str, check: Callable[[], None]) -> None:
        if form not in self.forms:
            return
        self.layout: list[str] = []
        try:
            check()
        except SkippedError:
            return
        except Exception as error:
            kind = classify(error)
            self.result.note(form, kind)
            text = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
            self.result.failures.append(
                {
                    "form": form,
                    "class": kind,
                    "sample": self.number,
                    "call": describe(self.call)[:300],
                    "layouts": self.layout,
                    "text": text[:600],
                }
            )
        else:
            self.result.note(form, PASS)
        finally:
            if form == "forward":
                self.result.layouts.append("; ".join(self.layout))

    def _cpu(self, function: Callable[..., Any], call: Any, **extra: Any) -> Any:
        torch.manual_seed(SEED)
        try:
            return function(call[0], *call[1], **call[2], **extra)
        except Exception as error:
            raise SkippedError(f"{type(error).__name__}: {error}") from error

    def _ours(self, call: Any, whole: bool = False) -> tuple[Distributor, Any]:
        to_mesh = Distributor(self.mesh, self.seed, whole)
        self.layout = to_mesh.layouts
        if entries.ON_HOST.fullmatch(self.result.name):
            return to_mesh, (to_mesh(call[0]), *call[1:])
        return to_mesh, to_mesh(call)

    def _run(self, function: Callable[..., Any], call: Any, **extra: Any) -> Any:
        torch.manual_seed(SEED)
        return function(call[0], *call[1], **call[2], **extra)

    def _compare(self, actual: Any, wanted: Any, what: str) -> None:
        process = self.sample.output_process_fn_grad
        if process is not None and entries.UP_TO_PHASE.fullmatch(self.result.name):
            compare(actual, wanted, self.tolerance, what, values=False)
            actual, wanted = process(actual), process(wanted)
        else:
            process = None

        def exact() -> Any:
            result = self._cpu(self.entry, in_double(self.call))
            return result if process is None else process(result)

        self._compare_values(actual, wanted, exact, what)

    def _compare_values(
        self, actual: Any, wanted: Any, exact: Callable[[], Any], what: str
    ) -> None:
        """Compare with CPU torch; where that fails, with CPU torch in double precision."""
        try:
            compare(actual, wanted, self.tolerance, what, self.values)
        except Mismatch as mismatch:
            try:
                reference = exact()
            except SkippedError:
                raise mismatch from None
            if not as_exact(actual, wanted, reference, self.tolerance, mismatch.kind):
                raise
            self.result.more_exact += 1

    def forward(self, function: Callable[..., Any] | None = None) -> None:
        function = function or self.entry
        wanted = self._cpu(function, fresh(self.call, False))
        _, call = self._ours(fresh(self.call, False))
        actual = self._run(function, call)
        self._compare(actual, wanted, "result")
        draws = self.random and not self.values
        if draws and not entries.UP_TO_SIGNS.fullmatch(self.result.name):
            _, again = self._ours(fresh(self.call, False), whole=True)
            other = self._run(function, again)
            _, call = self._ours(fresh(self.call, False))
            for a, b in zip(tensors(actual), tensors(other), strict=True):
                compare(a, b.cpu(), None, "the same seed in another layout")
            if self.number == 0:
                self._compare_distributions(function)

    def _compare_distributions(self, function: Callable[..., Any]) -> None:
        """Over many seeds, CPU torch's numbers and ours come from one distribution (two
        samples, Kolmogorov-Smirnov)."""
        _, ours = self._ours(fresh(self.call, False))
        calls = fresh(self.call, False), ours
        drawn: list[list[np.ndarray]] = [[], []]
        set_seed = torch.manual_seed
        for seed in range(DRAWS):
            # Some entries set a seed themselves.
            with mock.patch("torch.manual_seed", lambda _, by=seed: set_seed(SEED + by)):
                for call, into in zip(calls, drawn, strict=True):
                    torch.manual_seed(SEED)
                    result = tensors(function(call[0], *call[1], **call[2]))
                    into.append(np.concatenate([_real_numbers(t) for t in result]))
        ours_all, torchs_all = np.concatenate(drawn[1]), np.concatenate(drawn[0])
        if len(ours_all) == 0:
            return
        p = stats.ks_2samp(ours_all, torchs_all, method="asymp").pvalue
        if p < 1e-6:
            raise Mismatch(
                WRONG,
                f"another distribution: over {DRAWS} seeds the numbers have mean "
                f"{ours_all.mean():.4g} and deviation {ours_all.std():.4g}, CPU torch's "
                f"{torchs_all.mean():.4g} and {torchs_all.std():.4g} (p = {p:.1e})",
            )

    def backward(self) -> None:
        call = fresh(self.call, True)
        process = self.sample.output_process_fn_grad or (lambda out: out)
        outputs, sources = self._differentiated(call, process)
        torch.manual_seed(SEED)
        seeds = [torch.randn_like(t.detach()) for t in outputs]
        grads = self._gradients(outputs, sources, seeds)
        to_mesh, ours = self._ours(call)
        results = tensors(process(self._run(self.entry, ours)))
        results = [t for t in results if t.requires_grad]
        if len(results) != len(outputs):
            text = f"{len(results)} results require grad, torch has {len(outputs)}"
            raise Mismatch("shape/dtype", text)
        our_seeds = [_like(s, r) for s, r in zip(seeds, results, strict=True)]
        our_sources = [to_mesh.tensor(t) for t in sources]
        actual = torch.autograd.grad(results, our_sources, our_seeds, allow_unused=True)

        def exact() -> Any:
            pair = self._differentiated(in_double(self.call), process)
            return self._gradients(*pair, in_double(seeds))

        self._compare_values(list(actual), grads, exact, "gradient")

    def _differentiated(self, call: Any, process: Callable[..., Any]) -> Any:
        """CPU torch's results that require grad, and the inputs that do."""
        wanted = self._cpu(self.entry, call)
        outputs = [t for t in tensors(process(wanted)) if t.requires_grad]
        sources = [t for t in _unique(tensors(call)) if t.requires_grad]
        if not outputs or not sources:
            raise SkippedError
        return outputs, sources

    def _gradients(self, outputs: Any, sources: Any, seeds: Any) -> list[Any]:
        try:
            return list(torch.autograd.grad(outputs, sources, seeds, allow_unused=True))
        except Exception as error:
            raise SkippedError from error

    def inplace(self) -> None:
        call = fresh(self.call, False)
        _, ours = self._ours(fresh(self.call, False))
        wanted = self._cpu(self.entry.inplace_variant, call)
        actual = self._run(self.entry.inplace_variant, ours)

        def exact() -> Any:
            return self._cpu(self.entry, in_double(self.call))

        self._compare_values(actual, wanted, exact, "result")
        self._compare_values(ours[0], call[0], exact, "written input")
        if (wanted is call[0]) != (actual is ours[0]):
            raise Mismatch(WRONG, "the result is not the input itself")

    def out(self) -> None:
        plain = self._cpu(self.entry, fresh(self.call, False))
        if not isinstance(plain, torch.Tensor | tuple | list) or not tensors(plain):
            raise SkippedError
        empty = fresh(plain, False)
        with torch.no_grad():
            for t in tensors(empty):
                t.fill_(1)
        strided = isinstance(empty, torch.Tensor) and empty.layout is torch.strided
        if strided and self.number % 2:
            empty = empty.new_empty(0)  # torch resizes it
        call = fresh(self.call, False)
        to_mesh, ours = self._ours(fresh(self.call, False))
        our_out = to_mesh(empty)
        self._cpu(self.entry, call, out=empty)
        self._run(self.entry, ours, out=our_out)
        self._compare(our_out, empty, "out")

    def alias(self) -> None:
        """A write to the first result reaches the inputs where CPU torch's does, and no others."""
        if not self.values:
            raise SkippedError
        call = fresh(self.call, False)
        wanted = self._cpu(self.entry, call)
        results = tensors(wanted)
        if not results:
            raise SkippedError
        try:
            results[0].fill_(1)
        except RuntimeError as error:
            raise SkippedError from error
        _, ours = self._ours(fresh(self.call, False))
        actual = self._run(self.entry, ours)
        tensors(actual)[0].fill_(1)
        pairs = zip(tensors(ours), tensors(call), strict=True)
        moved = [(a, w) for a, w in pairs if a.device.type == "xla"]
        ours_moved, theirs = [a for a, _ in moved], [w for _, w in moved]
        compare(ours_moved, theirs, None, "input after a write to the result")


def _real_numbers(tensor: torch.Tensor) -> np.ndarray:
    value = plain(tensor)
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.double().flatten().numpy()


def _unique(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(v): v for v in values}.values())


def _like(value: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """``value`` laid out as ``model``."""
    if not isinstance(model, DTensor):
        return value.to(model.device)
    whole = [Replicate() if isinstance(p, Partial) else p for p in model.placements]
    return distribute_tensor(value, model.device_mesh, whole)


def describe(call: Any) -> str:
    """A call's arguments in a line: tensors as their dtypes and shapes."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype)[6:]}{list(value.shape)}"
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return "(" + ", ".join(map(one, value)) + ")"
        return repr(value)

    parts = [one(call[0]), *map(one, call[1]), *(f"{k}={one(v)}" for k, v in call[2].items())]
    return ", ".join(parts)


__all__ = ["FORMS", "Result", "check_entry", "describe"]
