"""`torch.cond`, `while_loop`, `scan` and `map`, as JAX's in a compiled step.

Eagerly Python decides and counts, as torch does without a compiler. In a compiled step, which has
no values, each becomes the loop or the branch of JAX's that is its like, and is part of the step's
program: its body is traced once, and what it costs to compile doesn't depend on the number of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.base import executor
from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.control_flow.captured import Autocast, CapturingFunction, captured_by
from xla_dtensor.control_flow.differentiable import call
from xla_dtensor.errors import RandomNumbersError, UnsupportedOpError
from xla_dtensor.jax_programs.values import words_of
from xla_dtensor.tensors.of_form import is_ours

Function = Callable[..., Any]


def cond(pred: Any, true_fn: Function, false_fn: Function, operands: Any = ()) -> Any:
    """``torch.cond``."""
    if executor.current().has_values or not is_ours(pred):
        return (true_fn if pred else false_fn)(*operands)
    flat, spec = pytree.tree_flatten(tuple(operands))
    branches = [_OnLeaves(f, spec) for f in (true_fn, false_fn)]

    def program(run: _Calls, pred: Any, flat: Any) -> Any:
        both = [lambda flat, f=f: run(f, flat) for f in (0, 1)]
        return lax.cond(pred.reshape(()) != 0, *both, flat)

    def check() -> None:
        one, other = branches
        if (one.gives, one.shapes) != (other.gives, other.shapes):
            _refuse("torch.cond: one branch returns", one, "the other", other)

    found = _as_one(program, branches, [flat, flat], [pred, flat], check)
    return pytree.tree_unflatten(found, branches[0].gives)


def while_loop(cond_fn: Function, body_fn: Function, carried_inputs: Any) -> Any:
    """``while_loop``. In a compiled step numbers among what is carried are tensors."""
    if executor.current().has_values:
        carried = carried_inputs
        while cond_fn(*carried):
            carried = body_fn(*carried)
        return carried
    flat, spec = pytree.tree_flatten(tuple(carried_inputs))
    flat = [x if isinstance(x, torch.Tensor) else torch.tensor(x, device="xla") for x in flat]

    def program(run: _Calls, flat: Any) -> Any:
        def goes_on(state: Any) -> Any:
            return jnp.asarray(run(0, state[1], state[0])[0]).reshape(()) != 0

        def step(state: Any) -> Any:
            return state[0] + 1, run(1, state[1], state[0])

        return lax.while_loop(goes_on, step, (jnp.uint32(0), flat))[1]

    body = _OnLeaves(body_fn, spec)
    carried = _OnLeaves(_same, spec, spec, flat)

    def check() -> None:
        if (body.gives, body.shapes) != (spec, carried.shapes):
            _refuse("while_loop: body_fn returns", body, "and what is carried is", carried)

    functions = [_OnLeaves(cond_fn, spec), body]
    found = _as_one(program, functions, [flat, flat], [flat], check, differentiable=False)
    return pytree.tree_unflatten(found, spec)


def scan(
    combine_fn: Function, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    """``scan``: the last carry, and what each step gives, stacked along ``dim``."""
    rows, of_rows = pytree.tree_flatten(xs)
    if not rows:
        return init, []
    dim %= rows[0].ndim
    rows = [x.movedim(dim, 0) for x in rows]
    if executor.current().has_values:
        carry, ys = init, []
        order = range(len(rows[0]))
        for i in reversed(order) if reverse else order:
            carry, y = combine_fn(carry, pytree.tree_unflatten([x[i] for x in rows], of_rows))
            ys.append(y)
        stacked = _stacked(ys[::-1] if reverse else ys)
    else:
        flat, of_carry = pytree.tree_flatten(init)
        count = len(flat)
        (first, given) = _one_of(rows), pytree.tree_flatten((init, xs))[1]
        step = _OnLeaves(combine_fn, given)

        def program(run: _Calls, flat: Any, rows: Any) -> Any:
            def one(state: Any, row: Any) -> Any:
                found = run(0, [*state[1], *row], state[0])
                return (state[0] + 1, found[:count]), found[count:]

            (_, carry), ys = lax.scan(one, (jnp.uint32(0), flat), rows, reverse=reverse)
            return carry, ys

        carried = _OnLeaves(_same, of_carry, of_carry, flat)

        def check() -> None:
            carry, _ = pytree.tree_unflatten(range(len(step.shapes)), step.gives)
            leaves, structure = pytree.tree_flatten(carry)
            own = _OnLeaves(combine_fn, given, structure)
            own.shapes = [step.shapes[i] for i in leaves]
            if (structure, own.shapes) != (of_carry, carried.shapes):
                _refuse("scan: combine_fn returns a carry of", own, "and init is", carried)

        carry, ys = _as_one(program, [step], [[*flat, *first]], [flat, rows], check)
        carry, stacked = pytree.tree_unflatten([*carry, *ys], step.gives)
    return carry, pytree.tree_map(lambda y: y.movedim(0, dim) if dim < y.ndim else y, stacked)


def map_along(f: Function, xs: Any, *args: Any) -> Any:
    """``map``: what ``f`` gives for each part of ``xs`` along dim 0, stacked."""
    rows, of_rows = pytree.tree_flatten(xs)
    if executor.current().has_values:
        parts = ([x[i] for x in rows] for i in range(len(rows[0])))
        return _stacked([f(pytree.tree_unflatten(part, of_rows), *args) for part in parts])
    flat, spec = pytree.tree_flatten((xs, *args))
    others = flat[len(rows) :]
    function = _OnLeaves(f, spec)

    def program(run: _Calls, rows: Any, others: Any) -> Any:
        return lax.scan(lambda i, row: (i + 1, run(0, [*row, *others], i)), jnp.uint32(0), rows)[1]

    found = _as_one(program, [function], [[*_one_of(rows), *others]], [rows, others], lambda: None)
    return pytree.tree_unflatten(found, function.gives)


def _one_of(rows: Sequence[Any]) -> list[Any]:
    return [x[0] for x in rows]


def _stacked(parts: Sequence[Any]) -> Any:
    return pytree.tree_map(lambda *each: torch.stack(each), *parts)


class _OnLeaves:
    """A function of lists of tensors: JAX's structures have an order of their own for dicts.

    Args:
        function: is given the structure that torch calls it with.
        takes: what structure that is.
        gives: that of its results.
        leaves: its results, if they are there.

    Attributes:
        gives: likewise, when it has been called.
        shapes: the results' shapes and dtypes.
    """

    def __init__(
        self, function: Function, takes: Any, gives: Any = None, leaves: Sequence[Any] = ()
    ) -> None:
        self._function, self._takes, self.gives = function, takes, gives
        self.shapes = [(tuple(x.shape), to_jax_dtype(x.dtype)) for x in leaves]

    def __call__(self, *flat: Any) -> list[Any]:
        found = self._function(*pytree.tree_unflatten(list(flat), self._takes))
        if isinstance(found, list):
            found = tuple(found)
        leaves, self.gives = pytree.tree_flatten(found)
        return leaves

    def __str__(self) -> str:
        texts = [f"{dtype.name}{list(shape)}" for shape, dtype in self.shapes]
        return str(pytree.tree_unflatten(texts, self.gives)).replace("'", "")


def _same(*given: Any) -> Any:
    return given


def _refuse(first: str, one: _OnLeaves, second: str, other: _OnLeaves) -> NoReturn:
    raise UnsupportedOpError(
        f"{first} {one}, {second} {other}: both must be tensors of the same shapes and dtypes in "
        f"the same structure{user_line()}"
    )


class _Calls:
    """Calls of torch functions in JAX's program, by their number.

    Args:
        functions: the functions.
        captured: by function the tensors from outside that it uses.
        arrays: their values.
        seed: of the random numbers; None if none are drawn.
        autocast: what torch says of it here.
    """

    def __init__(
        self,
        functions: Sequence[_OnLeaves],
        captured: Sequence[Any],
        arrays: Any,
        seed: Any,
        autocast: Autocast,
    ) -> None:
        self._functions, self._captured, self._arrays = functions, captured, arrays
        self._seed, self._autocast = seed, autocast

    def __call__(self, which: int, flat: Any, run: Any = None) -> Any:
        words = None
        if self._seed is not None:
            key = _key(self._seed)
            words = words_of(key if run is None else jax.random.fold_in(key, run))
        held = self._captured[which], self._arrays[which]
        return CapturingFunction(self._functions[which], flat, *held, self._autocast)(words)


def _key(seed: Any) -> Any:
    return jax.random.key(seed, impl="threefry2x32")


def _as_one(
    program: Callable[..., Any],
    functions: Sequence[_OnLeaves],
    examples: Sequence[list[Any]],
    arguments: Sequence[Any],
    check: Callable[[], None],
    differentiable: bool = True,
) -> Any:
    """One operation of the step, which ``program`` says in JAX.

    Args:
        program: is given what calls the functions, and arrays for the arguments.
        functions: torch functions that it calls.
        examples: by function arguments as it will be given them.
        arguments: tensors, and lists of them.
        check: is called when the functions know what they return.
        differentiable: whether JAX can differentiate it.
    """
    seed = None
    given = list(zip(functions, examples, strict=True))
    try:
        traced = [captured_by(f, args, None) for f, args in given]
    except RandomNumbersError:
        seed = torch.randint(2**62, (), device="xla")
        traced = [captured_by(f, args, words_of(_key(0))) for f, args in given]
    captured = [tensors for tensors, _ in traced]
    for function, (_, shapes) in zip(functions, traced, strict=True):
        function.shapes = [(tuple(x.shape), x.dtype) for x in shapes]
    check()
    # In the body of a loop the tensors around it are replaced themselves, by a mode: `view_as`.
    held = [[tensor.view_as(tensor) for tensor in tensors] for tensors in captured]
    tensors = pytree.tree_leaves([*arguments, held])
    if not differentiable and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedOpError(
            "while_loop of a tensor that requires grad: a loop whose number of runs nobody knows "
            "keeps nothing for a backward pass; use scan where the number is known, or "
            f"torch.no_grad() or detach() where no gradient is needed{user_line()}"
        )

    autocast = Autocast()
    flat, spec = jax.tree.flatten((list(arguments), held, seed))
    structure: list[Any] = []

    def in_jax(*flat: Any) -> list[Any]:
        arguments, held, seed = jax.tree.unflatten(spec, flat)
        found = program(_Calls(functions, captured, held, seed, autocast), *arguments)
        leaves, structure[:] = jax.tree.flatten(found)[0], [jax.tree.structure(found)]
        return list(leaves)

    in_jax.__name__ = program.__qualname__.split(".")[0]
    outs = call(in_jax, flat)
    return jax.tree.unflatten(structure[0], outs)
