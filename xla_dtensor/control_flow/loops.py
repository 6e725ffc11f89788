"""`torch.cond`, `while_loop`, `scan` and `map`, as JAX's in a compiled step.

Eagerly Python decides and counts, as torch does without a compiler. In a compiled step, which has
no values, each becomes the loop or the branch of JAX's that is its like, and is part of the step's
program: its body is traced once, and what it costs to compile doesn't depend on the number of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.base import executor
from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compilation.scan.autocasts import Autocast
from xla_dtensor.control_flow.captured import CapturingFunction, captured_by
from xla_dtensor.control_flow.differentiable import call
from xla_dtensor.control_flow.results import NewResults, Results, Skeleton, as_tensor, check_alike
from xla_dtensor.control_flow.side_effects import Surroundings
from xla_dtensor.errors import RandomNumbersError, UnsupportedOpError
from xla_dtensor.jax_programs.values import words_of
from xla_dtensor.tensors.of_form import is_ours

Function = Callable[..., Any]
_Run = Callable[..., Any]
"""Calls a function by its number: on arrays, and which run of a loop it is, for random numbers."""


def cond(pred: Any, true_fn: Function, false_fn: Function, operands: Any = ()) -> Any:
    """``torch.cond``."""
    if not is_ours(pred):
        return (true_fn if pred else false_fn)(*operands)
    if pred.numel() != 1:
        raise RuntimeError(
            "Expected pred to be bool or single-element tensor, but got one of shape "
            f"{list(pred.shape)}{user_line()}"
        )
    if executor.current().has_values:
        results = NewResults()
        return results.of((true_fn if pred else false_fn)(*operands), operands)
    flat, tree = Skeleton.apart(tuple(operands))
    bodies = _Bodies((true_fn, tree, flat), (false_fn, tree, flat))
    one, other = bodies.results
    check_alike("torch.cond: one branch returns", one, "the other", other)

    def program(run: _Run, pred: Any, flat: Any) -> Any:
        both = [lambda flat, f=f: run(f, flat) for f in (0, 1)]
        return lax.cond(pred.reshape(()) != 0, *both, flat)

    return one.put_together(bodies.as_one(program, pred, flat))


def while_loop(cond_fn: Function, body_fn: Function, carried_inputs: Any) -> Any:
    """``while_loop``. In a compiled step numbers among what is carried are tensors."""
    given = Results.of(tuple(carried_inputs))
    if executor.current().has_values:
        carried, results = carried_inputs, NewResults()
        while cond_fn(*carried):
            carried = body_fn(*carried)
            found = tuple(carried) if isinstance(carried, list) else carried
            _check_carried(Results.of(found), given)
        return results.of(carried, carried_inputs)
    flat, tree = Skeleton.apart(tuple(carried_inputs), numbers=True)
    bodies = _Bodies((cond_fn, tree, flat), (body_fn, tree, flat))
    _check_carried(bodies.results[1], given)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*flat, *bodies.captured)):
        raise UnsupportedOpError(
            "while_loop of a tensor that requires grad: a loop whose number of runs nobody knows "
            "keeps nothing for a backward pass; use scan where the number is known, or "
            f"torch.no_grad() or detach() where no gradient is needed{user_line()}"
        )

    def program(run: _Run, flat: Any) -> Any:
        def goes_on(state: Any) -> Any:
            return jnp.asarray(run(0, state[1], state[0])[0]).reshape(()) != 0

        def step(state: Any) -> Any:
            return state[0] + 1, run(1, state[1], state[0])

        return lax.while_loop(goes_on, step, (jnp.uint32(0), flat))[1]

    return given.put_together(bodies.as_one(program, flat))


def _check_carried(found: Results, given: Results) -> None:
    check_alike("while_loop: body_fn returns", found, "and what is carried is", given)


def scan(
    combine_fn: Function, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    """``scan``: the last carry, and what each step gives, stacked along ``dim``."""
    rows, of_rows = pytree.tree_flatten(xs)
    if not rows:
        return init, []
    dim = _checked_rows("scan: xs", rows, dim)
    rows = [x.movedim(dim, 0) for x in rows]
    given = Results.of(init)
    if executor.current().has_values:
        carry, ys, new = init, [], NewResults()
        order = range(len(rows[0]))
        for i in reversed(order) if reverse else order:
            carry, y = combine_fn(carry, pytree.tree_unflatten([x[i] for x in rows], of_rows))
            _check_carry(Results.of(carry), given)
            ys.append(y)
        carry, stacked = new.of(carry, init), _stacked(ys[::-1] if reverse else ys)
    else:
        flat, _ = Skeleton.apart(init, numbers=True)
        _, tree = Skeleton.apart((init, xs), numbers=True)
        bodies = _Bodies((combine_fn, tree, [*flat, *(x[0] for x in rows)]))
        (results,) = bodies.results
        _check_carry(results.first(), given)

        def program(run: _Run, flat: Any, rows: Any) -> Any:
            def step(state: Any, row: Any) -> Any:
                found = run(0, [*state[1], *row], state[0])
                return (state[0] + 1, found[: len(flat)]), found[len(flat) :]

            (_, carry), ys = lax.scan(step, (jnp.uint32(0), flat), rows, reverse=reverse)
            return [*carry, *ys]

        carry, stacked = results.put_together(bodies.as_one(program, flat, rows))
    return carry, pytree.tree_map(
        lambda y: y.movedim(0, dim) if y is not None and dim < y.ndim else y, stacked
    )


def _check_carry(found: Results, given: Results) -> None:
    check_alike("scan: combine_fn returns a carry of", found, "and init is", given)


def map_along(f: Function, xs: Any, *args: Any) -> Any:
    """``map``: what ``f`` gives for each part of ``xs`` along dim 0, stacked."""
    rows, of_rows = pytree.tree_flatten(xs)
    _checked_rows("map: xs", rows, 0)
    if executor.current().has_values:
        parts = ([x[i] for x in rows] for i in range(len(rows[0])))
        return _stacked([f(pytree.tree_unflatten(part, of_rows), *args) for part in parts])
    flat, tree = Skeleton.apart((xs, *args))
    others = flat[len(rows) :]
    bodies = _Bodies((f, tree, [*(x[0] for x in rows), *others]))

    def program(run: _Run, rows: Any, others: Any) -> Any:
        return lax.scan(lambda i, row: (i + 1, run(0, [*row, *others], i)), jnp.uint32(0), rows)[1]

    return bodies.results[0].put_together(bodies.as_one(program, rows, others))


def _checked_rows(what: str, rows: Sequence[Any], dim: int) -> int:
    """The dim, counted from the first one.

    Raises:
        RuntimeError, IndexError: these can't be gone through along it.
    """
    if not rows or not all(isinstance(x, torch.Tensor) for x in rows):
        raise RuntimeError(f"{what} can only consist of tensors{user_line()}")
    rows[0].size(dim)  # or torch's error
    dim %= rows[0].ndim
    lengths = [x.shape[dim] if dim < x.ndim else 0 for x in rows]
    if any(length == 0 or length != lengths[0] for length in lengths):
        shapes = ", ".join(str(list(x.shape)) for x in rows)
        raise RuntimeError(
            f"{what} must have one length above 0 along dim {dim}, and have the shapes "
            f"{shapes}{user_line()}"
        )
    return dim


def _stacked(parts: Sequence[Any]) -> Any:
    def stacked(*each: Any) -> Any:
        if each[0] is None:
            return None
        return torch.stack([as_tensor(x) for x in each])

    return pytree.tree_map(stacked, *parts)


class _Bodies:
    """Torch functions that a program in JAX calls.

    Args:
        given: of each the function, its arguments without the tensors, and tensors like those that
            it will be called with.

    Attributes:
        results: what each returns.
    """

    def __init__(self, *given: tuple[Function, Any, list[Any]]) -> None:
        self._trees: list[Any] = [None] * len(given)
        self._functions = [self._of_leaves(i, f, tree) for i, (f, tree, _) in enumerate(given)]
        self._autocast = Autocast.here()
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._seed = None
        around = Surroundings(function for function, *_ in given)
        try:
            found = self._found(given, None)
        except RandomNumbersError:
            self._seed = torch.randint(2**62, (), device="xla")
            found = self._found(given, words_of(_key(0)))
        around.check()
        self._captured = [tensors for tensors, _ in found]
        self.results = [
            Results(tree, [(tuple(x.shape), x.dtype) for x in shapes])
            for tree, (_, shapes) in zip(self._trees, found, strict=True)
        ]

    def _of_leaves(self, which: int, function: Function, tree: Skeleton) -> Function:
        def on_leaves(*flat: Any) -> list[Any]:
            # Traced where both are as if nobody had said anything.
            with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
                found = function(*tree.put_together(flat))
            tensors, self._trees[which] = Skeleton.apart(
                tuple(found) if isinstance(found, list) else found, numbers=True
            )
            return tensors

        return on_leaves

    def _found(self, given: Sequence[Any], words: Any) -> list[Any]:
        flats = [flat for *_, flat in given]
        return [captured_by(f, flat, words) for f, flat in zip(self._functions, flats, strict=True)]

    @property
    def captured(self) -> list[torch.Tensor]:
        """The tensors from outside that they use."""
        return [tensor for tensors in self._captured for tensor in tensors]

    def as_one(self, program: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        """One operation of the step, which ``program`` says in JAX.

        Args:
            program: is given what calls the functions, and arrays for the arguments.
            arguments: tensors, and lists of them.

        Returns:
            tensors for the arrays that ``program`` returns.
        """
        # In another body the tensors around it are replaced themselves, by a mode: `view_as`.
        held = [[tensor.view_as(tensor) for tensor in tensors] for tensors in self._captured]
        flat, spec = jax.tree.flatten((arguments, held, self._seed))

        def in_jax(*flat: Any) -> list[Any]:
            arguments, held, seed = jax.tree.unflatten(spec, flat)

            def run(which: int, flat: list[Any], number: Any = None) -> Any:
                words = None
                if seed is not None:
                    key = _key(seed)
                    words = words_of(key if number is None else jax.random.fold_in(key, number))
                own = self._functions[which], flat, self._captured[which], held[which]
                return CapturingFunction(*own, self._autocast)(words)

            return list(program(run, *arguments))

        in_jax.__name__ = program.__qualname__.split(".")[0]
        return call(in_jax, flat)


def _key(seed: Any) -> Any:
    return jax.random.key(seed, impl="threefry2x32")
