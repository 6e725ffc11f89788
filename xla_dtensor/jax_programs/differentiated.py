"""Torch code as a function of arrays that JAX differentiates by torch's own gradient formulas.

``jax.custom_vjp`` around a whole call: forward, torch's autograd writes down its graph on JAX's
tracers; backward, the graph runs on the tracers of the backward pass. So what torch code says about
gradients holds: ``no_grad``, ``detach()``, an ``autograd.Function``'s own backward, hooks,
checkpoints, the value of a derivative at a kink. A backward pass is torch code itself, and is
differentiated in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.base.dtypes import to_torch_dtype
from xla_dtensor.base.jax_private import varying_axes
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, device_form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.read import logical_value
from xla_dtensor.forms.storage import Storage
from xla_dtensor.jax_programs.program_trace import ProgramTrace, give_up, tracing
from xla_dtensor.runtime.arrays import strong
from xla_dtensor.tensors.of_form import is_ours, new_tensor


class Code(Protocol):
    """Torch code, as a function of a list of tensors."""

    def form(self, index: int, array: Any) -> Form:
        """The form of the tensor of argument ``index``."""

    def wants_gradient(self, index: int) -> bool | None:
        """Whether argument ``index`` requires grad; None: if JAX differentiates by it."""

    def within(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """A block in which the code or its backward pass runs on ``tensors``."""

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results."""


class _Entry(torch.autograd.Function):
    """An argument, which no longer is a leaf: code may write to it."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return new_tensor(leaf._storage_.array, leaf._form)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class _Graph:
    """What torch's autograd has written down of one run of the code.

    Between passes the memory that the graph refers to has no value: each backward pass brings its
    own arrays along, those that JAX has kept for it.

    Attributes:
        entered: the leaves that the run began with.
        leaves: by argument the tensor whose gradient is that of the argument; None if it has none.
        wanted: by argument whether that is asked for.
        outs: the results.
        storages: the memory that it may refer to.
        within: a block in which it can run.
        drawn: how many random operations the run has made.
        cut: by argument whether its gradient should be there, and isn't.
    """

    def __init__(
        self,
        entered: list[torch.Tensor],
        leaves: list[torch.Tensor | None],
        wanted: list[bool],
        outs: list[torch.Tensor],
        storages: list[Storage],
        within: Callable[[], AbstractContextManager[None]],
        drawn: int,
    ) -> None:
        self.entered, self.leaves, self.wanted, self.outs = entered, leaves, wanted, outs
        self.storages = storages
        self.within, self.drawn = within, drawn
        self.cut = [False] * len(leaves)
        self._forms = [storage.form for storage in storages]

    @contextmanager
    def running(self, trace: ProgramTrace, kept: Sequence[Any]) -> Iterator[None]:
        """A block in which its memory holds the arrays ``kept``."""
        with tracing(trace):
            try:
                for storage, form, array in zip(self.storages, self._forms, kept, strict=True):
                    storage.put_back(array, form)
                    trace.created(storage)
                with self.within():
                    yield
            finally:
                give_up(self.storages)


class _Kept:
    """What a backward pass needs: the arrays, and the graph.

    Attributes:
        words: the state of the random numbers.
        primals: the arguments.
        arrays: those of the graph's storages.
        graph: the graph.
    """

    def __init__(self, words: Any, primals: Any, arrays: Any, graph: _Graph) -> None:
        self.words, self.primals, self.arrays, self.graph = words, primals, arrays, graph


jax.tree_util.register_pytree_node(
    _Kept,
    lambda kept: ((kept.words, kept.primals, kept.arrays), kept.graph),
    lambda graph, children: _Kept(*children, graph=graph),  # type: ignore[misc]
)


def call(code: Code, words: Any, arrays: Sequence[Any]) -> list[Any]:
    """The results of torch code on arrays, as JAX differentiates them.

    Args:
        words: the state of the random numbers; None: it draws none.
    """

    @jax.custom_vjp
    def computed(words: Any, *arrays: Any) -> list[Any]:
        trace = ProgramTrace(words)
        with tracing(trace):
            wanted = [bool(code.wants_gradient(i)) for i in range(len(arrays))]
            _, tensors = _entries(code, arrays, wanted)
            with code.within(tensors):
                return [_result(out) for out in code.run(tensors)]

    def forward(words: Any, *primals: Any) -> Any:
        given, words = _values(primals), _value(words)
        differentiated = [p.perturbed for p in primals]
        inexact = list(map(_is_inexact, given))
        try:
            # Not only those by which JAX differentiates now: an outer differentiation of this one
            # may go by others.
            results, arrays, graph = _with_graph(code, words, given, differentiated, inexact)
        except RuntimeError as error:
            if "is not differentiable with respect to argument" not in str(error):
                raise
            # A target, a batch norm's statistics: torch refuses such arguments that require grad.
            results, arrays, graph = _with_graph(code, words, given, differentiated, differentiated)
            graph.cut = [i and not d for i, d in zip(inexact, differentiated, strict=True)]
        kept = _Kept(words, given, arrays, graph)
        return _with_gradient(kept, results), kept

    computed.defvjp(forward, _backward, symbolic_zeros=True)
    results: list[Any] = computed(words, *arrays)
    return results


def _with_graph(
    code: Code, words: Any, given: list[Any], differentiated: list[bool], entering: list[bool]
) -> tuple[list[Any], list[Any], _Graph]:
    """The results of the code, the arrays that its backward pass needs, and the graph of that.

    Args:
        entering: the arguments that require grad, where the code doesn't say.
    """
    trace = ProgramTrace(words)
    stopped = [jax.lax.stop_gradient(array) for array in given]
    with tracing(trace):
        own = map(code.wants_gradient, range(len(given)))
        wanted = [e if o is None else o for e, o in zip(entering, own, strict=True)]
        entered, tensors = _entries(code, stopped, wanted)
        with code.within(tensors):
            outs = code.run(tensors)
        results = [_result(out) for out in outs]
        within = lambda: code.within(tensors)
        leaves = [x if x.requires_grad else None for x in entered]
        graph, arrays = _kept_by(trace, entered, leaves, differentiated, outs, within)
    return results, arrays, graph


def _kept_by(
    trace: ProgramTrace,
    entered: list[Any],
    leaves: list[Any],
    differentiated: list[bool],
    outs: list[Any],
    within: Any,
) -> tuple[_Graph, list[Any]]:
    storages = trace.left_behind()
    wanted = [leaf is not None and d for leaf, d in zip(leaves, differentiated, strict=True)]
    graph = _Graph(entered, leaves, wanted, outs, storages, within, trace.random.latest)
    return graph, [storage.array for storage in storages]


def _with_gradient(kept: _Kept, results: list[Any]) -> list[Any]:
    """``results``, whose gradient is what ``kept`` gives: for an outer differentiation."""

    @jax.custom_vjp
    def attached(kept: _Kept, results: list[Any]) -> list[Any]:
        return results

    def forward(kept: Any, results: Any) -> Any:
        for primal, is_cut in zip(kept.primals, kept.graph.cut, strict=True):
            if is_cut and primal.perturbed:
                _refuse_cut()
        kept = jax.tree.map(_value, kept, is_leaf=_is_primal)
        return _with_gradient(kept, _values(results)), kept

    def backward(kept: _Kept, cotangents: Any) -> Any:
        _, *gradients = _backward(kept, cotangents)
        return _Kept(None, gradients, [None] * len(kept.arrays), kept.graph), None

    attached.defvjp(forward, backward, symbolic_zeros=True)
    found: list[Any] = attached(kept, results)
    return found


def _refuse_cut() -> NoReturn:
    raise UnsupportedOpError(
        "a gradient of a gradient by an argument by which the inner one doesn't differentiate, of "
        "torch functions where torch can't differentiate all of its arguments (a target, a batch "
        "norm's statistics): let jax.grad go by that argument, too (argnums=), or detach() in the "
        "torch function what needs no gradient"
    )


def _backward(kept: _Kept, cotangents: list[Any]) -> tuple[Any, ...]:
    """The gradients by the words and each argument."""
    graph = kept.graph
    at = [
        i
        for i, (out, ct) in enumerate(zip(graph.outs, cotangents, strict=True))
        if out.requires_grad and not _is_zero(ct)
    ]
    if not at or not any(graph.wanted):
        return (None,) * (1 + len(graph.leaves))
    with jax.enable_x64(True):
        found = iter(_pulled(kept, at, [cotangents[i] for i in at]))
    return (None, *(next(found) if wanted else None for wanted in graph.wanted))


def _pulled(kept: _Kept, at: list[int], cotangents: list[Any]) -> list[Any]:
    """The gradients by the arguments that are wanted, of cotangents of the results ``at``. It is
    differentiated as `call` is: by the graph of torch's backward pass."""
    graph = kept.graph
    there = [i for i, leaf in enumerate(graph.leaves) if leaf is not None]
    leaves, primals = [graph.leaves[i] for i in there], [kept.primals[i] for i in there]
    asked = [n for n, i in enumerate(there) if graph.wanted[i]]
    cut = [kept.primals[i] for i, is_cut in enumerate(graph.cut) if is_cut]
    outs = [graph.outs[i] for i in at]

    def gradients(primals: Any, cotangents: Any, twice: bool) -> tuple[Any, Any, Any]:
        # JAX's gradient by a complex value is the conjugate of torch's.
        given = [strong(ct).conj() for ct in cotangents]
        of = [new_tensor(ct, out._form) for ct, out in zip(given, outs, strict=True)]
        if twice:
            of = [tensor.requires_grad_() for tensor in of]
        found = _gradients(outs, [leaves[n] for n in asked], of, graph.entered, twice)
        fitting = [_fitting(_result(g), primals[n]) for g, n in zip(found, asked, strict=True)]
        return of, found, fitting

    @jax.custom_vjp
    def computed(words: Any, kept: Any, cut: Any, primals: Any, cotangents: Any) -> list[Any]:
        trace = ProgramTrace(words, graph.drawn)
        with graph.running(trace, kept):
            fitting: list[Any] = gradients(primals, cotangents, False)[2]
            return fitting

    def forward(words: Any, kept: Any, cut: Any, primals: Any, cotangents: Any) -> Any:
        if any(p.perturbed for p in cut):
            _refuse_cut()
        differentiated = [p.perturbed for p in (*primals, *cotangents)] + [False] * len(cut)
        words, kept = _value(words), _values(kept)
        primals, cotangents = _values(primals), _values(cotangents)
        trace = ProgramTrace(words, graph.drawn)
        stopped, ps, cts = jax.lax.stop_gradient((kept, primals, cotangents))
        with graph.running(trace, stopped):
            of, found, results = gradients(ps, cts, True)
            second, arrays = _kept_by(
                *(trace, graph.entered, [*leaves, *of, *[None] * len(cut)]),
                *(differentiated, found, graph.within),
            )
        second.cut[len(leaves) + len(of) :] = [True] * len(cut)
        second_kept = _Kept(words, [*primals, *cotangents, *_values(cut)], arrays, second)
        return _with_gradient(second_kept, results), second_kept

    def backward(second: _Kept, cotangents: Any) -> Any:
        _, *gradients = _backward(second, cotangents)
        first, end = len(leaves), len(leaves) + len(outs)
        none = [None] * len(graph.storages), [None] * len(cut)
        return None, *none, gradients[:first], gradients[first:end]

    computed.defvjp(forward, backward, symbolic_zeros=True)
    found: list[Any] = computed(kept.words, kept.arrays, cut, primals, cotangents)
    return found


def _gradients(outs: Any, leaves: Any, of: Any, entered: Any, twice: bool) -> list[Any]:
    """torch's gradients of ``outs`` by ``leaves``; with a graph of their own if ``twice``."""
    try:
        with torch.set_grad_enabled(twice):
            return list(
                torch.autograd.grad(
                    *(outs, leaves, of),
                    retain_graph=True,
                    create_graph=twice,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
    except RuntimeError as error:
        if twice or "use_reentrant" not in str(error):
            raise
    # A reentrant checkpoint, which adds to `.grad` itself, of whatever it finds.
    torch.autograd.backward(outs, of, retain_graph=True)
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for leaf in entered:
        leaf.grad = None
    return found


def _entries(
    code: Code, arrays: Sequence[Any], wanted: Sequence[bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """By argument a leaf, and what the code is given for it."""
    leaves, tensors = [], []
    for i, (array, want) in enumerate(zip(arrays, wanted, strict=True)):
        leaf = new_tensor(array, code.form(i, array))
        if want:
            leaf.requires_grad_()
        entered = want and code.wants_gradient(i) is None
        leaves.append(leaf)
        tensors.append(_Entry.apply(leaf) if entered else leaf)
    return leaves, tensors


def plain_form(array: Any) -> Form:
    """The form of a tensor that is an array of JAX's as it is, wherever that lies."""
    return device_form(None, tuple(array.shape), dtype=to_torch_dtype(array.dtype))


def _result(tensor: torch.Tensor) -> Any:
    if not is_ours(tensor):
        return jnp.asarray(to_numpy(tensor.detach()))
    return logical_value(tensor)


def _fitting(gradient: Any, primal: Any) -> Any:
    """A gradient as JAX wants it: in ``shard_map`` the gradient of what devices share is the sum of
    theirs."""
    mine, its = varying_axes(gradient), varying_axes(primal)
    if extra := tuple(mine - its):
        gradient = jax.lax.psum(gradient, extra)
    if missing := tuple(its - mine):
        gradient = jax.lax.pcast(gradient, missing, to="varying")
    return gradient.conj().astype(primal.dtype)


def _is_inexact(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _is_primal(value: Any) -> bool:
    return isinstance(value, jax.custom_derivatives.CustomVJPPrimal)


def _value(primal: Any) -> Any:
    return primal.value if _is_primal(primal) else primal


def _values(primals: Sequence[Any]) -> list[Any]:
    return list(map(_value, primals))


def _is_zero(cotangent: Any) -> bool:
    return cotangent is None or isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
