"""Every view lowering reads, and writes through to, its base as CPU torch does."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import xla_dtensor.lowering.families  # noqa: F401  registers
from xla_dtensor.lowering import find_lowering, find_view
from xla_dtensor.lowering.registry import qualified_name


def to_jax(x: torch.Tensor) -> jax.Array:
    x = x.resolve_conj().resolve_neg()
    if x.dtype is torch.bfloat16:
        return jnp.asarray(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return jnp.asarray(x.numpy())


def check(actual: jax.Array, expected: torch.Tensor) -> None:
    expected = to_jax(expected)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(np.prod(shape))
    if dtype.is_complex:
        return torch.view_as_complex(sample((*shape, 2), torch.float64)).to(dtype)
    values = torch.arange(1, count + 1).reshape(shape)
    return values % 3 == 0 if dtype is torch.bool else values.to(dtype)


F32, C64 = torch.float32, torch.complex64
CASES: list[tuple[str, tuple[int, ...], torch.dtype, tuple[Any, ...]]] = [
    ("alias", (2, 3), F32, ()),
    ("alias", (0, 3), torch.bfloat16, ()),
    ("detach", (2, 3), torch.int64, ()),
    ("lift_fresh", (), F32, ()),
    ("view", (4, 6), F32, ([2, -1, 3],)),
    ("view", (0, 3), F32, ([-1, 3],)),
    ("view", (), F32, ([1, 1],)),
    ("_reshape_alias", (4, 6), torch.int32, ([8, 3], [3, 1])),
    ("view.dtype", (3, 4), F32, (torch.int32,)),
    ("view.dtype", (3, 4), F32, (torch.int16,)),
    ("view.dtype", (3, 4), torch.int16, (F32,)),
    ("view.dtype", (3, 4), torch.bfloat16, (torch.uint8,)),
    ("view.dtype", (), F32, (torch.int32,)),
    ("view.dtype", (3, 4), F32, (C64,)),
    ("view.dtype", (3, 4), torch.float64, (C64,)),
    ("view.dtype", (), torch.float64, (C64,)),
    ("view.dtype", (3, 4), C64, (F32,)),
    ("view.dtype", (), C64, (torch.float64,)),
    ("view.dtype", (3, 4), torch.bool, (torch.uint8,)),
    ("view.dtype", (3, 4), torch.bool, (torch.int16,)),
    ("view_as_real", (3, 4), C64, ()),
    ("view_as_real", (), torch.complex128, ()),
    ("view_as_complex", (3, 4, 2), F32, ()),
    ("_conj", (3, 4), C64, ()),
    ("_neg_view", (3, 4), F32, ()),
    ("squeeze", (1, 3, 1), F32, ()),
    ("squeeze.dim", (1, 3, 1), F32, (-1,)),
    ("squeeze.dim", (1, 3, 1), F32, (1,)),
    ("squeeze.dim", (), F32, (-1,)),
    ("squeeze.dims", (1, 3, 1), F32, ([0, 1],)),
    ("unsqueeze", (2, 3), F32, (-1,)),
    ("unsqueeze", (), F32, (0,)),
    ("permute", (2, 3, 4), F32, ([2, 0, -2],)),
    ("permute", (), F32, ([],)),
    ("transpose.int", (2, 3, 4), F32, (0, -1)),
    ("transpose.int", (), F32, (0, -1)),
    ("t", (2, 3), F32, ()),
    ("t", (3,), F32, ()),
    ("t", (), F32, ()),
    ("expand", (2, 3), F32, ([1, -1, 3],)),
    ("expand", (2, 1), F32, ([2, 0],)),
    ("slice.Tensor", (5, 3), F32, ()),
    ("slice.Tensor", (5, 3), F32, (0, 1, None)),
    ("slice.Tensor", (5, 3), F32, (0, None, -1)),
    ("slice.Tensor", (3, 7), torch.bfloat16, (-1, 1, 100, 2)),
    ("slice.Tensor", (3, 7), torch.bool, (1, -5, -2)),
    ("slice.Tensor", (3, 7), F32, (1, 2, 3)),
    ("slice.Tensor", (3, 7), F32, (1, 5, 2)),
    ("slice.Tensor", (3, 7), F32, (1, 9, 20)),
    ("slice.Tensor", (3, 7), F32, (1, 0, 7, 4)),
    ("select.int", (4, 3), F32, (0, 2)),
    ("select.int", (4, 3), F32, (-1, -1)),
    ("select.int", (4,), torch.int64, (0, 1)),
    ("diagonal", (4, 3), F32, ()),
    ("diagonal", (3, 4), F32, (1,)),
    ("diagonal", (4, 3), F32, (-2,)),
    ("diagonal", (3, 4), F32, (4,)),
    ("diagonal", (3, 2, 4), F32, (1, 2, 0)),
    ("diagonal", (3, 2, 4), C64, (-1, -1, 1)),
    ("as_strided", (4, 6), F32, ([4, 6], [6, 1])),
    ("as_strided", (4, 6), F32, ([6, 4], [1, 6], 0)),
    ("as_strided", (4, 6), F32, ([2, 3], [12, 2], 1)),
    ("as_strided", (4, 6), F32, ([3, 1, 2], [6, 9, 1], 2)),
    ("as_strided", (4, 6), F32, ([], [], 5)),
    ("as_strided", (4, 6), F32, ([2, 0], [1, 1])),
    ("unfold", (2, 7), F32, (1, 3, 3)),
    ("unfold", (7, 2), F32, (0, 2, 3)),
    ("unfold", (2, 7, 2), F32, (-2, 2, 2)),
    ("unfold", (2, 3), F32, (1, 3, 1)),
    ("unfold", (), F32, (0, 1, 1)),
    ("split.Tensor", (7, 2), F32, (3,)),
    ("split.Tensor", (2, 6), F32, (2, -1)),
    ("split.Tensor", (2, 0), F32, (0, 1)),
    ("split_with_sizes", (7, 2), F32, ([3, 0, 4],)),
    ("split_with_sizes", (2, 6), F32, ([1, 5], 1)),
    ("unbind.int", (3, 2), F32, ()),
    ("unbind.int", (3, 2), F32, (-1,)),
]
ids = [f"{name}-{list(shape)}-{args}" for name, shape, _, args in CASES]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "shape", "dtype", "args"), CASES, ids=ids)
def test_get_and_put(name: str, shape: Any, dtype: torch.dtype, args: Any) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    base = sample(shape, dtype)
    expected = op(base, *args)
    multiple = isinstance(expected, list | tuple)
    lowering = find_view(qualified_name(name))
    assert lowering is not None

    with jax.enable_x64(True):
        actual = jax.jit(lambda x: lowering.get(x, *args))(to_jax(base))
        for i, part in enumerate(expected if multiple else [expected]):
            check(actual[i] if multiple else actual, part)

            written = base.clone()
            view = op(written, *args)[i] if multiple else op(written, *args)
            value = view.clone().resolve_conj().resolve_neg()
            value = ~value if dtype is torch.bool else value.flip(list(range(value.ndim)))
            value = value if value.dtype is torch.bool else value + value
            view.copy_(value)
            index = (i,) if multiple else ()
            put = jax.jit(lambda x, v, index=index: lowering.put(x, v, *index, *args))
            check(put(to_jax(base), to_jax(value)), written)


def test_every_view_overload_has_a_lowering() -> None:
    """Except the composites, which torch decomposes, and views of sparse and nested tensors."""
    special = ("nested", "sparse", "test", "indices", "values", "slice_inverse", "dual", "primal")
    missing = []
    for schema in torch._C._jit_get_all_schemas():
        is_view = any(a.alias_info and not a.alias_info.is_write for a in schema.arguments)
        returns_view = any(r.alias_info for r in schema.returns)
        if not (schema.name.startswith("aten::") and is_view and returns_view):
            continue
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        try:
            composite = torch._C._dispatch_has_kernel_for_dispatch_key(
                name, "CompositeImplicitAutograd"
            )
        except RuntimeError:  # a TorchScript-only operator
            continue
        wanted = not composite and not any(word in name for word in special)
        if wanted and find_view(qualified_name(name)) is None:
            missing.append(name)
    assert missing == []


REPEATING = [
    ("expand", (3, 1), (2, 3, 4), ([2, 3, 4],)),
    ("as_strided", (6,), (3, 2), ([3, 2], [1, 1], 1)),
    ("as_strided", (4,), (2, 2), ([2, 2], [0, 1], 0)),
    ("unfold", (2, 5), (2, 4, 2), (1, 2, 1)),
]


@pytest.mark.parametrize(("name", "shape", "view_shape", "args"), REPEATING)
def test_the_greatest_of_all_places(
    name: str, shape: tuple[int, ...], view_shape: tuple[int, ...], args: tuple[Any, ...]
) -> None:
    lowering = find_view(qualified_name(name))
    assert lowering is not None
    assert lowering.repeats is not None
    assert lowering.greatest is not None
    assert lowering.repeats(shape, *args)
    values = torch.randperm(math.prod(view_shape)).reshape(view_shape) + 1
    view = getattr(torch.ops.aten, name)
    places = view(torch.arange(math.prod(shape)).reshape(shape), *args)
    expected = torch.zeros(math.prod(shape), dtype=torch.int64)
    expected.scatter_reduce_(0, places.reshape(-1), values.reshape(-1), "amax")
    with jax.enable_x64(True):
        result = lowering.greatest(to_jax(values).astype(np.uint32), shape, *args)
    np.testing.assert_array_equal(result, expected.reshape(shape))


def test_strides_out_of_bounds() -> None:
    strided = find_view("aten::as_strided.default")
    assert strided is not None
    with pytest.raises(ValueError, match="reach element 5 of a tensor with 4"):
        strided.get(jnp.zeros(4), [2, 2], [3, 2])


BACKWARDS: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = [
    ("slice_backward", (3, 4), ([3, 9], 1, 1, 9, 2)),
    ("slice_backward", (3, 4), ([3, 9], 1, -6, -2, 1)),
    ("select_backward", (3,), ([3, 4], 1, -1)),
    ("diagonal_backward", (3,), ([4, 4], -1, 0, 1)),
    ("unfold_backward", (2, 3, 4), ([2, 8], 1, 4, 2)),
]


@pytest.mark.parametrize(("name", "shape", "args"), BACKWARDS)
def test_backward(name: str, shape: Any, args: Any) -> None:
    grad = sample(shape)
    lowering = find_lowering(qualified_name(name))
    assert lowering is not None
    with jax.enable_x64(True):
        actual = jax.jit(lambda g: lowering.function(g, *args))(to_jax(grad))
        check(actual, getattr(torch.ops.aten, name)(grad, *args))


SCATTERS: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = [
    ("slice_scatter", (2, 3), (0, 1, 4, 2)),
    ("select_scatter", (3,), (0, -2)),
    ("diagonal_scatter", (3,), (-1, 0, 1)),
    ("as_strided_scatter", (2, 2), ([2, 2], [3, 2], 1)),
]


@pytest.mark.parametrize(("name", "shape", "args"), SCATTERS)
def test_scatter(name: str, shape: Any, args: Any) -> None:
    base, value = sample((4, 3)), -sample(shape)
    lowering = find_lowering(qualified_name(name))
    assert lowering is not None
    with jax.enable_x64(True):
        actual = jax.jit(lambda x, v: lowering.function(x, v, *args))(to_jax(base), to_jax(value))
        check(actual, getattr(torch.ops.aten, name)(base, value, *args))


@pytest.mark.parametrize(
    ("name", "shape", "args"),
    [
        ("slice_scatter", (1, 3), (0, 1, 4, 2)),
        ("select_scatter", (3,), (0, 4)),
        ("select_scatter", (3,), (0, -5)),
        ("select_scatter", (1,), (0, 0)),
        ("diagonal_scatter", (1,), (-1, 0, 1)),
        ("as_strided_scatter", (2, 1), ([2, 2], [3, 2], 1)),
    ],
)
def test_scatters_out_of_place_are_refused_as_torch_does(
    name: str, shape: tuple[int, ...], args: tuple[Any, ...]
) -> None:
    base, value = sample((4, 3)), sample(shape)
    scatter = getattr(torch.ops.aten, name)
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        scatter(base, value, *args)
    with pytest.raises(type(theirs.value), match=r"expected src|out of range"):
        scatter(base.to("xla"), value.to("xla"), *args)
