"""torch's ``module_db`` on sharded parameters, buffers and inputs, against CPU torch.

Every module, in training and in evaluation: results, gradients of parameters and inputs, and the
buffers afterwards. Where it draws random numbers, CPU torch tells shapes and dtypes, and the same
seed has to give the same numbers in another layout.
"""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parameter import is_lazy

import xla_dtensor as xd
from tests.conformance.check import SEED, Result
from tests.conformance.compare import PASS, Mismatch, as_exact, classify, compare
from tests.conformance.layouts import Distributor, draw, fresh, in_double, tensors

FORMS = tuple(
    f"{mode} {form}" for mode in ("train", "eval") for form in ("forward", "gradients", "buffers")
)


@functools.cache
def module_db() -> list[Any]:
    with warnings.catch_warnings():  # torch's tests deprecate parts of torch
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db as entries
    return entries


def check_module(entry: Any, mesh: DeviceMesh, limit: int, layouts: int = 1) -> Result:
    """Compare one module with CPU torch, with up to ``limit`` of torch's settings of it in each
    mode, taken evenly from all."""
    result = Result(entry.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for training in (True, False):
            torch.manual_seed(SEED)
            every = entry.module_inputs_func(
                entry, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )
            chosen = [setting for setting in every if setting.forward_input is not None]
            for number, setting in enumerate(chosen[:: max(1, -(-len(chosen) // limit))]):
                result.samples += 1
                for variant in range(layouts):
                    _Setting(entry, setting, training, mesh, f"{number} {variant}", result).run()
    return result


class _Setting:
    """One way in which torch's tests make and call a module."""

    def __init__(
        self, entry: Any, setting: Any, training: bool, mesh: DeviceMesh, seed: str, result: Result
    ) -> None:
        self.entry, self.mesh, self.result = entry, mesh, result
        self.training = training
        made = setting.constructor_input
        self.make = lambda: entry.module_cls(*made.args, **made.kwargs)
        self.call = (tuple(setting.forward_input.args), dict(setting.forward_input.kwargs))
        self.seed = f"{result.name} {tuple(mesh.shape)} {training} {seed}"
        self.about = f"{made.args} {made.kwargs} {setting.desc}"
        self.layouts: list[str] = []

    def run(self) -> None:
        mode = "train" if self.training else "eval"
        done = []
        try:
            for form, check in self._checks():
                done.append(form)
                check()
                self.result.note(f"{mode} {form}", PASS)
        except Exception as error:
            form = f"{mode} {done[-1] if done else 'forward'}"
            kind = classify(error)
            self.result.note(form, kind)
            text = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
            self.result.failures.append(
                {
                    "form": form,
                    "class": kind,
                    "sample": self.result.samples - 1,
                    "call": " ".join(self.about.split())[:300],
                    "layouts": self.layouts,
                    "text": text[:600],
                }
            )

    def _checks(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is looked at, in order; each needs what was before it."""
        module = self._module("cpu")
        before = copy.deepcopy(module)
        call = fresh(self.call, True)
        wanted = _called(module, call)
        draws = self._draws(before)
        torch.manual_seed(SEED)  # in the same order as below
        to_mesh = Distributor(self.mesh, self.seed)
        self.layouts = to_mesh.layouts
        ours = self._sharded(before)
        our_call = to_mesh(call)

        def double() -> Any:
            exact = copy.deepcopy(before).double()
            given = in_double(self.call)
            return exact, given, _called(exact, given)

        found: list[Any] = []

        def forward() -> None:
            found.append(_called(ours, our_call))
            self._compare(found[0], wanted, lambda: double()[2], "result", not draws)
            if draws:
                whole = Distributor(self.mesh, self.seed, whole=True)
                again = _called(self._sharded(before, whole=True), whole(fresh(self.call, True)))
                for one, other in zip(tensors(found[0]), tensors(again), strict=True):
                    compare(one, other.detach().cpu(), None, "the same seed in another layout")

        yield "forward", forward
        outputs, results = _differentiable(wanted), _differentiable(found[0])

        def gradients() -> None:
            if len(results) != len(outputs):
                text = f"{len(results)} results require grad, torch has {len(outputs)}"
                raise Mismatch("shape/dtype", text)
            generator = torch.Generator().manual_seed(SEED)
            seeds = [torch.randn(t.shape, generator=generator) for t in outputs]
            expected = _gradients(outputs, _sources(module, call), seeds)
            given = [distribute_tensor(s, self.mesh, [Replicate()] * 2) for s in seeds]
            actual = _gradients(results, _sources(ours, our_call), given)

            def exact() -> Any:
                wide, inputs, out = double()
                return _gradients(_differentiable(out), _sources(wide, inputs), in_double(seeds))

            self._compare(actual, expected, exact, "gradient", not draws)

        if outputs:
            yield "gradients", gradients
        buffers = [b.detach() for b in module.buffers()]
        if buffers:
            yield (
                "buffers",
                lambda: self._compare(
                    [b.detach() for b in ours.buffers()],
                    buffers,
                    lambda: [b.detach() for b in double()[0].buffers()],
                    "buffer",
                    True,
                ),
            )

    def _module(self, device: str) -> nn.Module:
        torch.manual_seed(SEED)
        module = self.make().to(device).to(torch.float32)
        module.train(self.training)
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):  # now they have shapes
            args, kwargs = fresh(self.call, False)
            with torch.no_grad():
                module(*(arg.to(device) for arg in args), **kwargs)
        return module

    def _sharded(self, before: nn.Module, whole: bool = False) -> nn.Module:
        """A copy of a module of the CPU, each parameter and buffer in a layout drawn for it. A lazy
        one gets its shapes on the devices, and then the copy's values."""
        module = copy.deepcopy(before)
        if self.entry.is_lazy:
            module = self._module("xla")
            module.load_state_dict(before.state_dict())
        rng = random.Random(self.seed)

        def laid_out(value: torch.Tensor) -> torch.Tensor:
            # As a bool, it isn't drawn to be a part of a sum, which no leaf is.
            placements = draw(rng, tuple(value.shape), torch.bool, tuple(self.mesh.shape))
            if whole:
                placements = tuple(Replicate() for _ in placements)
            return distribute_tensor(value.detach(), self.mesh, placements)

        def partition(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for key, value in list(part._parameters.items()):
                if value is not None:
                    setattr(part, key, nn.Parameter(laid_out(value), value.requires_grad))
            for key, value in list(part._buffers.items()):
                if value is not None:
                    part._buffers[key] = laid_out(value)

        return xd.distribute_module(module, self.mesh, partition)

    def _draws(self, before: nn.Module) -> bool:
        """Whether results depend on the seed."""
        results = []
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            module = copy.deepcopy(before)
            args, kwargs = fresh(self.call, False)
            results.append(tensors(module(*args, **kwargs)))
        same = lambda a, b: torch.allclose(a, b, equal_nan=True)
        return not all(all(map(same, results[0], other)) for other in results[1:])

    def _compare(
        self, actual: Any, wanted: Any, exact: Callable[[], Any], what: str, values: bool
    ) -> None:
        try:
            compare(actual, wanted, None, what, values)
        except Mismatch as mismatch:
            if not as_exact(actual, wanted, exact(), None, mismatch.kind):
                raise
            self.result.more_exact += 1


def _called(module: nn.Module, call: Any) -> Any:
    torch.manual_seed(SEED)
    return module(*call[0], **call[1])


def _differentiable(results: Any) -> list[torch.Tensor]:
    return [t for t in tensors(results) if t.requires_grad]


def _sources(module: nn.Module, call: Any) -> list[torch.Tensor]:
    given = {id(t): t for t in (*module.parameters(), *tensors(call)) if t.requires_grad}
    return list(given.values())


def _gradients(outputs: Any, sources: Any, seeds: Any) -> list[Any]:
    return list(torch.autograd.grad(outputs, sources, seeds, allow_unused=True))
