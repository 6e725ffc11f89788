"""`call`, `view` and `array`: torch functions on arrays, structures, dtypes."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import xla_dtensor as xd
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.errors import UnsupportedOpError

from .test_transforms import close

Pair = namedtuple("Pair", "first second")


def test_structures_in_and_out() -> None:
    def function(a: Any, *, b: Any, word: str) -> Any:
        return {"sum": a[0] + b.first, word: (a[1], None, 3, "text"), "pair": Pair(b.second, a[0])}

    one, two = jnp.arange(3.0), jnp.ones((2, 2))
    out = xd.jax.call(function, [one, two], b=Pair(one, two), word="rest")
    assert out["rest"][1:] == (None, 3, "text")
    close(out["sum"], np.array([0.0, 2, 4]))
    assert type(out["pair"]) is Pair and all(isinstance(x, jax.Array) for x in out["pair"])


def test_numpy_arrays_and_numbers() -> None:
    out = xd.jax.call(lambda x, n: x.sum(n), np.ones((2, 3), np.float32), 1)
    assert isinstance(out, jax.Array) and out.tolist() == [3, 3]


def test_containers_of_torchs_pytree_are_known_to_jax() -> None:
    class Output(dict[str, Any]):
        """As Hugging Face has them."""

    pytree.register_pytree_node(
        Output,
        lambda o: (list(o.values()), list(o)),
        lambda values, names: Output(zip(names, values, strict=True)),
        serialized_type_name="tests.jax_programs.Output",
    )
    make = jax.jit(lambda x: xd.jax.call(lambda x: Output(logits=x * 2, states=(x,)), x))
    out = make(jnp.ones(3))
    assert type(out) is Output and out["logits"].tolist() == [2, 2, 2]
    total = jax.grad(lambda x: make(x)["logits"].sum())(jnp.ones(3))
    assert total.tolist() == [2, 2, 2]


def test_positions_are_those_of_torch() -> None:
    """Where JAX has 32 bits, torch code gets the 64 that it wants."""
    assert not jax.config.jax_enable_x64
    logits, target = jnp.arange(12.0).reshape(3, 4), jnp.array([0, 3, 1])
    found = jax.jit(lambda *a: xd.jax.call(F.cross_entropy, *a))(logits, target)
    wanted = F.cross_entropy(torch.arange(12.0).reshape(3, 4), torch.tensor([0, 3, 1]))
    close(found, wanted.numpy())
    best = jax.jit(lambda x: xd.jax.call(lambda x: x.max(-1), x))(logits)
    assert best[1].dtype == jnp.int32 and best[1].tolist() == [3, 3, 3]
    rows = jax.vmap(lambda x, i: xd.jax.call(lambda x, i: x.gather(0, i), x, i))
    assert rows(logits, target[:, None]).tolist() == [[0], [7], [9]]
    with jax.enable_x64(True):
        assert xd.jax.call(torch.argmax, jnp.ones(3)).dtype == jnp.int64
        kept = xd.jax.call(lambda x: x + 1, jnp.ones(3, jnp.int32))
        assert kept.dtype == jnp.int32


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float16", "bfloat16", "complex64"])
def test_dtypes(dtype: str) -> None:
    x = jnp.ones(3, dtype)
    out = jax.jit(lambda x: xd.jax.call(torch.clone, x))(x)
    assert out.dtype == x.dtype and (out == x).all()


def test_complex_gradients_are_jaxs() -> None:
    x = jnp.array([1.0 + 2j, -0.5j])
    found = jax.grad(lambda x: jnp.real(xd.jax.call(lambda x: x * x * (1 + 2j), x)).sum())(x)
    close(found, np.asarray(jax.grad(lambda x: jnp.real(x * x * (1 + 2j)).sum())(x)))
    pair = lambda x: xd.jax.call(torch.view_as_real, x)
    mine = lambda x: jnp.stack([x.real, x.imag], -1)
    weights = jnp.array([[1.0, 2], [3, 4]])
    close(
        jax.grad(lambda x: (pair(x) * weights).sum())(x),
        np.asarray(jax.grad(lambda x: (mine(x) * weights).sum())(x)),
    )


def test_arguments_by_which_torch_cannot_differentiate() -> None:
    logits, target = jnp.arange(3.0), jnp.array([0.0, 1, 0.5])

    def loss(x: Any, target: Any) -> Any:
        return xd.jax.call(F.soft_margin_loss, x, target)

    x = torch.arange(3.0, requires_grad=True)
    F.soft_margin_loss(x, torch.tensor([0.0, 1, 0.5])).backward()
    assert x.grad is not None
    close(jax.jit(jax.grad(loss))(logits, target), x.grad.numpy())
    with pytest.raises(RuntimeError, match="not differentiable with respect"):
        jax.grad(loss, argnums=1)(logits, target)
    mixed = jax.grad(lambda t: jax.grad(loss)(logits, t).sum())
    with pytest.raises(UnsupportedOpError, match="gradient of a gradient"):
        mixed(target)


def test_arguments_are_not_written_to() -> None:
    x = jnp.ones(3)
    out = xd.jax.call(lambda x: (x.mul_(3), x.relu_())[1], x)
    assert out.tolist() == [3, 3, 3] and x.tolist() == [1, 1, 1]
    slope = jax.grad(lambda x: xd.jax.call(lambda x: x.mul_(3), x).sum())(x)
    assert slope.tolist() == [3, 3, 3]


def test_backward_inside() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(3, device=x.device, requires_grad=True)
        (weight * x * x).sum().backward()
        assert weight.grad is not None
        return weight.grad

    assert jax.jit(lambda x: xd.jax.call(function, x))(jnp.arange(3.0)).tolist() == [0, 1, 4]


def test_constants_of_the_host() -> None:
    table = torch.arange(3.0)
    out = jax.jit(lambda x: xd.jax.call(lambda x: x + table.to(x.device) + torch.tensor(1.0), x))
    assert out(jnp.ones(3)).tolist() == [2, 3, 4]
    on_device = torch.arange(3.0, device="xla") * 2  # not computed yet
    again = jax.jit(lambda x: xd.jax.call(lambda x: x + on_device, x))
    assert again(jnp.ones(3)).tolist() == [1, 3, 5]


def test_view_and_array() -> None:
    x = jnp.arange(3.0)
    tensor = xd.jax.view(x)
    assert xd.jax.array(tensor) is x
    tensor.add_(1)
    assert x.tolist() == [0, 1, 2] and tensor.tolist() == [1, 2, 3]
    assert xd.jax.array(tensor).tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match=r"jax\.Array is wanted"):
        xd.jax.view([1.0])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="requires grad"):
        xd.jax.array(torch.ones(3, device="xla", requires_grad=True))


def test_jax_inside_of_torch_inside_of_jax() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return xd.jax.view(jnp.sin(xd.jax.array(x.detach()))) + x

    out = jax.jit(lambda x: xd.jax.call(function, x))(jnp.arange(3.0))
    close(out, np.sin(np.arange(3.0)) + np.arange(3.0))
    with pytest.raises(RuntimeError, match="jax_function"):
        jax.grad(lambda x: xd.jax.call(lambda x: xd.jax.view(xd.jax.array(x)), x).sum())(out)
    with pytest.raises(TypeError, match=r"xd\.jax\.call"):
        jax.jit(lambda x: xd.jax.array(xd.jax.view(x)))(jnp.ones(3))


def test_tensors_of_an_outer_call_are_arguments() -> None:
    def outer(x: torch.Tensor) -> torch.Tensor:
        inner = lambda y: y + x
        return xd.jax.view(xd.jax.call(inner, xd.jax.array(x.detach())))

    with pytest.raises(xd.DataDependentError, match="pass it as an argument"):
        jax.jit(lambda x: xd.jax.call(outer, x))(jnp.ones(3))


def test_a_torch_gradient_in_a_jax_function_in_torch() -> None:
    """The JAX function's gradient is torch's, which runs while a batch of torch's is launched."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    wave = xd.jax_function(lambda a: xd.jax.call(lambda a: a.sin() * a, a))
    ours, theirs = x.to("xla").requires_grad_(), x.clone().requires_grad_()
    waiting = ours.detach() * 3  # is launched with it
    (wave(ours) * 2).sum().backward()
    (theirs.sin() * theirs * 2).sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
    assert torch.equal(waiting.cpu(), x * 3)
