"""`DistributedOptimizer`: a torch optimizer whose gradients are averaged over the ranks."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.horovod.api.adasum_optimizer import AdasumOptimizer
from xla_dtensor.horovod.api.calls import synchronize
from xla_dtensor.horovod.api.collectives import grouped_allreduce_async
from xla_dtensor.horovod.api.compression import Compression
from xla_dtensor.horovod.api.optimizer_hooks import GradientHooks, check_names
from xla_dtensor.horovod.api.sparse import sparse_allreduce_async
from xla_dtensor.horovod.collectives.reductions import Adasum, Average, Sum
from xla_dtensor.horovod.world.current_world import current
from xla_dtensor.horovod.world.process_sets import global_process_set
from xla_dtensor.horovod.world.write_into import written


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """An optimizer that averages the gradients over the ranks before each step.

    Reductions begin in backward, with each gradient, and ``step()`` waits for them; or
    ``synchronize()``, where gradients are clipped before ``step()`` in
    ``with optimizer.skip_synchronize():``. Inside of ``xd.compile`` all is one program.

    Args:
        optimizer: an optimizer; its state goes over to the new one.
        named_parameters: ``model.named_parameters()``: the names under which the ranks find each
            other's gradients. Numbered by default.
        compression: of `Compression`, what gradients travel as.
        backward_passes_per_step: how many times backward adds to the gradients before each step.
        op: `Average`, `Sum`, or `Adasum`, which combines what the ranks' own steps change.
        gradient_predivide_factor: f divides by f before the sum and by size / f after it.
        num_groups: deprecated; ``groups``.
        groups: gradients that are reduced together: a number of groups, or lists of parameters.
        sparse_as_dense: whether sparse gradients are reduced as dense ones.
        process_set: the ranks that take part; on others the optimizer is an ordinary one.

    Returns:
        an optimizer of a subclass of the class of ``optimizer``, with ``synchronize()``,
        ``skip_synchronize()`` and ``set_backward_passes_per_step(n)``.

    Raises:
        ValueError: names that aren't pairs, are there twice or are missing for a parameter; a
            ``gradient_predivide_factor`` with another ``op`` than `Average`;
            ``backward_passes_per_step`` below 1; groups that are no groups.
        NotImplementedError: `Adasum` in a process set.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        model = torch.nn.Linear(4, 2).to("xla")
        sgd = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
        x = hvd.per_rank(lambda rank: torch.randn(8, 4))  # each rank's batch
        model(x.to("xla")).square().mean().backward()
        optimizer.step()
        assert isinstance(optimizer, torch.optim.SGD) and model.weight.grad.varying == ()
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: give groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    names = check_names(optimizer, named_parameters)
    combines_steps = op == Adasum and current().size > 1
    if combines_steps and process_set != global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    methods = AdasumOptimizer if combines_steps else AveragingOptimizer
    cls: Any = type(type(optimizer).__name__, (methods, type(optimizer)), {})
    new = cls.__new__(cls)
    new.__dict__.update(optimizer.__dict__)
    if combines_steps:
        new.begin(names, compression, backward_passes_per_step)
    else:
        new.begin(
            names, compression, backward_passes_per_step, op, gradient_predivide_factor,
            _grouped(groups, new), sparse_as_dense, process_set,
        )  # fmt: skip
    return new


def _grouped(groups: Any, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]] | None:
    """Lists of parameters, as ``groups`` says."""
    if groups is None or (isinstance(groups, int) and groups == 0):
        return None
    if isinstance(groups, int) and groups > 0:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        count = min(groups, len(every))
        least, more = divmod(len(every), count)
        ends = [i * least + min(i, more) for i in range(count + 1)]
        return [every[a:b] for a, b in itertools.pairwise(ends)]
    if not isinstance(groups, list):
        raise ValueError(
            "groups should be a non-negative integer or a list of list of torch.Tensor."
        )
    seen: set[int] = set()
    for parameter in (p for group in groups for p in group):
        if not isinstance(parameter, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(parameter) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(parameter))
    return [list(group) for group in groups]


class AveragingOptimizer(GradientHooks):
    """The methods that `DistributedOptimizer` gives an optimizer."""

    def begin(
        self,
        names: dict[torch.Tensor, str],
        compression: Any,
        passes: int,
        op: int,
        predivide: float,
        groups: list[list[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: Any,
    ) -> None:
        """In place of a constructor; the arguments are those of `DistributedOptimizer`."""
        self._compression, self._op, self._predivide = compression, op, predivide
        self._sparse_as_dense, self.process_set = sparse_as_dense, process_set
        self._group_of = {p: group for group in groups or [] for p in group}
        self._handles: dict[Any, tuple[Any, int | None, Any]] = {}  # place in its group, context
        self._synchronized, self._should_synchronize = False, True
        self.watch(names, passes)

    # --- in backward ---------------------------------------------------------------------------

    def gradient_is_there(self, parameter: torch.Tensor) -> None:
        """Begin the reduction of a gradient, with those of its group."""
        group = self._group_of.get(parameter)
        if group is None:
            self._reduce([parameter])
        elif all(self.left[p] == 0 or not p.requires_grad for p in group):
            self._reduce([p for p in group if p.grad is not None])

    def _reduce(self, parameters: list[Any]) -> None:
        op, factors = self._op, (1.0, 1.0)
        if op == Average and self._predivide != 1.0:
            op, size = Sum, self.process_set.size()
            factors = 1 / self._predivide, self._predivide / size
        name = self.names[parameters[0]]
        options: dict[str, Any] = {"op": op, "process_set": self.process_set}
        if any(p.grad.is_sparse for p in parameters) and not self._sparse_as_dense:
            for p in parameters:
                sparse = sparse_allreduce_async(p.grad, name=self.names[p], **options)
                self._handles[p] = sparse, None, None
            return
        options |= {"prescale_factor": factors[0], "postscale_factor": factors[1], "name": name}
        pairs = [self._compression.compress(_dense(p.grad)) for p in parameters]
        handle = grouped_allreduce_async([tensor for tensor, _ in pairs], **options)
        for i, (p, (_, context)) in enumerate(zip(parameters, pairs, strict=True)):
            self._handles[p] = handle, i, context

    # --- before the step -----------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; those that backward hasn't reached take part with
        what they have, or zeros."""
        if not self.process_set.included():
            self._synchronized = True
            return
        self._check_place()
        self._begin_missing()
        for parameter, (handle, place, context) in self._handles.items():
            output = synchronize(handle)
            if place is None:
                parameter.grad = output.coalesce()
            else:
                _put_gradient(parameter, self._compression.decompress(output[place], context))
            self.left[parameter] = self.backward_passes_per_step
        self._handles.clear()
        self._synchronized = True

    def _check_place(self) -> None:
        if not self._handles or self.where.is_here():
            return
        if self.where.is_traced:
            self.forget()
            raise UnsupportedOpError(
                "DistributedOptimizer.synchronize() or step() after a backward() traced in "
                "a compiled step, which averages the gradients there: call both in the same step. "
                "(If that step couldn't be compiled, what it had begun is forgotten now: run "
                "backward() again.)"
            )
        raise UnsupportedOpError(
            "DistributedOptimizer.synchronize() or step() in a compiled step, after a backward() "
            "outside of it: call both in the compiled step, or both outside"
        )

    def forget(self) -> None:
        """Begin anew, without what is on its way."""
        self._handles.clear()
        super().forget()

    def _begin_missing(self) -> None:
        world = current()
        missing = {p for p in self.reduced if p not in self._handles}
        if not world.is_alone:
            for parameter in missing:  # another rank may have a gradient of it
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        for parameter in self.reduced:
            if parameter in missing and parameter not in self._handles:
                group = self._group_of.get(parameter, [parameter])
                waiting = [p for p in group if p in missing and p.grad is not None]
                if waiting:
                    self._reduce(waiting)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside of it ``step()`` doesn't wait for the gradients, since ``synchronize()`` has."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Wait for the gradients, and step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    # torch's mark of a step that has hooks around it: the wrapped optimizer's has them.
    step.hooked = True  # type: ignore[attr-defined]

    def is_between_backward_and_step(self) -> bool:
        """Whether reductions are on their way."""
        if self._handles and self.where.is_traced and not self.where.is_here():
            self.forget()
        return bool(self._handles)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _put_gradient(parameter: Any, value: Any) -> None:
    if parameter.grad.is_sparse:
        parameter.grad = value
    else:
        parameter.grad = written(parameter.grad, value)
