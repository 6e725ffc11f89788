"""`from_module`: parameters, buffers, random numbers, modes; what changes, what is refused."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import xla_dtensor as xd
from xla_dtensor.errors import DataDependentError, RandomNumbersError, UnsupportedOpError

from .cases import Tied
from .test_transforms import close


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def batch(rows: int = 4, width: int = 8) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


def jaxed(tensor: torch.Tensor) -> Any:
    return jnp.asarray(tensor.detach().numpy())


# --- parameters and buffers --------------------------------------------------------------------


def test_params_are_copies_by_name_and_tied_ones_come_once() -> None:
    module = Tied()
    params, _ = xd.jax.from_module(module)
    assert list(params) == ["embedding.weight"]
    before = np.asarray(params["embedding.weight"]).copy()
    with torch.no_grad():
        module.embedding.weight.zero_()
    close(params["embedding.weight"], before)


def test_params_may_be_given_away() -> None:
    module = mlp().to("xla")
    params, _ = xd.jax.from_module(module)
    step = jax.jit(lambda p, x: jax.tree.map(lambda a: a * 2, p), donate_argnums=0)
    step(params, jaxed(batch()))
    assert all(p.is_deleted() for p in params.values())
    assert module(batch().to("xla")).cpu().isfinite().all()


def test_a_module_without_data() -> None:
    with torch.device("meta"):
        module = mlp()
    shapes, apply = xd.jax.from_module(module)
    assert shapes["0.weight"] == jax.ShapeDtypeStruct((16, 8), jnp.float32)
    reference = mlp()
    params = {name: jaxed(p) for name, p in reference.named_parameters()}
    close(jax.jit(apply)(params, jaxed(batch())), reference(batch()).detach().numpy())
    out = jax.eval_shape(apply, shapes, jax.ShapeDtypeStruct((3, 8), jnp.float32))
    assert out.shape == (3, 8)


def test_batch_norm_returns_its_statistics() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    params, apply = xd.jax.from_module(module)
    x = batch(6)

    def loss(params: Any, buffers: Any, x: Any) -> Any:
        out, buffers = apply({**params, **buffers}, x, mutable=True)
        return (out**3).sum(), buffers

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    buffers = apply.buffers
    for _ in range(2):
        (value, buffers), gradients = step(params, buffers, jaxed(x))
        module.zero_grad()
        wanted = module(x).pow(3).sum()
        wanted.backward()
        close(value, wanted.detach().numpy(), 1e-4)
        close(gradients, {n: p.grad.numpy() for n, p in module.named_parameters()}, 1e-4)
        close(buffers, {n: b.numpy() for n, b in module.named_buffers()})
    assert int(buffers["1.num_batches_tracked"]) == 2
    assert int(apply.buffers["1.num_batches_tracked"]) == 0
    with pytest.raises(UnsupportedOpError, match=r"1\.running_mean.*mutable=True.*train=False"):
        apply(params, jaxed(x))
    evaluated = apply({**params, **buffers}, jaxed(x), train=False)
    close(evaluated, module.eval()(x).detach().numpy())


def test_the_mode_is_that_of_the_call() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    params, apply = xd.jax.from_module(module)
    x = jaxed(batch())
    plain = module[0](batch()).detach().numpy()
    close(apply(params, x, train=False), plain)
    assert module.training and module[1].training
    module.eval()
    close(apply(params, x), plain)
    key = jax.random.key(0)
    assert not np.allclose(apply(params, x, rng=key, train=True), plain)
    assert not module.training


def test_a_frozen_parameter_has_no_gradient() -> None:
    module = mlp()
    module[0].weight.requires_grad_(False)
    params, apply = xd.jax.from_module(module)
    gradients = jax.grad(lambda p: apply(p, jaxed(batch())).sum())(params)
    assert not gradients["0.weight"].any()
    assert gradients["2.weight"].any()


def test_hooks_of_parameters() -> None:
    module = mlp()
    module[0].weight.register_hook(lambda gradient: gradient * 3)
    params, apply = xd.jax.from_module(module)
    gradients = jax.jit(jax.grad(lambda p: apply(p, jaxed(batch())).sum()))(params)
    module(batch()).sum().backward()
    close(gradients["0.weight"], module[0].weight.grad.numpy())


def test_another_method() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)

        def scores(self, x: torch.Tensor, *, factor: float) -> dict[str, torch.Tensor]:
            return {"scores": self.linear(x) * factor}

    module = Two()
    params, apply = xd.jax.from_module(module)
    out = apply(params, jaxed(batch()), method="scores", factor=2.0)
    close(out, {"scores": module.scores(batch(), factor=2.0)["scores"].detach().numpy()})


# --- random numbers ------------------------------------------------------------------------------


def test_random_numbers_come_from_the_key() -> None:
    module = nn.Dropout(0.5)
    _, apply = xd.jax.from_module(module)
    x = jnp.ones((64, 64))
    drop = jax.jit(lambda key: apply({}, x, rng=key))
    one, again, other = (drop(jax.random.key(s)) for s in (0, 0, 1))
    assert (one == again).all() and (one != other).any()
    assert set(np.unique(one)) == {0.0, 2.0}
    torch.manual_seed(0)
    close(one, module(torch.ones(64, 64, device="xla")).cpu().numpy())  # the device's own
    rows = jax.vmap(drop)(jax.random.split(jax.random.key(0), 3))
    assert not (rows[0] == rows[1]).all()
    assert (drop(jax.random.PRNGKey(0)) == one).all()
    assert drop(jax.random.key(0, impl="rbg")).shape == x.shape


def test_gradients_see_the_same_numbers() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    params, apply = xd.jax.from_module(module)
    x, key = jaxed(batch()), jax.random.key(3)
    loss = lambda p, x: apply(p, x, rng=key).sum()
    slope = jax.grad(loss, argnums=1)(params, x)
    close((loss(params, x + 1e-2 * slope) - loss(params, x)) / 1e-2, (slope**2).sum(), 1e-2)
    again = jax.jit(jax.grad(jax.checkpoint(loss), argnums=1))(params, x)
    close(again, np.asarray(slope))


def test_a_checkpoint_drops_the_same_again() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.utils.checkpoint import checkpoint

            out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
    params, apply = xd.jax.from_module(inner)
    _, checkpointed = xd.jax.from_module(Checkpointed(inner))
    x, key = jaxed(batch()), jax.random.key(3)
    wanted = jax.grad(lambda p: apply(p, x, rng=key).sum())(params)
    found = jax.jit(jax.grad(lambda p: checkpointed(p, x, rng=key).sum()))(
        {f"inner.{name}": value for name, value in params.items()}
    )
    close({n.removeprefix("inner."): g for n, g in found.items()}, jax.tree.map(np.asarray, wanted))


def test_without_a_key_nothing_is_drawn() -> None:
    _, apply = xd.jax.from_module(nn.Dropout(0.5))
    with pytest.raises(RandomNumbersError, match=r"rng=jax\.random\.key"):
        jax.jit(apply)({}, jnp.ones(3))


def test_draws_on_the_host_are_refused() -> None:
    state = torch.get_rng_state()
    draw = lambda x: x + torch.rand(3).to(x.device)
    if threading.active_count() > 1:
        pytest.skip("with other threads it warns")
    with pytest.raises(RandomNumbersError, match=r"device=x\.device"):
        xd.jax.call(draw, jnp.ones(3), rng=jax.random.key(0))
    assert torch.equal(torch.get_rng_state(), state)


# --- on a mesh -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "tensor parallel", "fully sharded", "replicated"])
def test_sharded_modules(how: str) -> None:
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    module, reference = mlp(), mlp()
    if how == "tensor parallel":
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        module = parallelize_module(module, mesh["tp"], styles)
    elif how == "fully sharded":
        module = xd.fully_shard(module, mesh=mesh["dp"])
    elif how == "replicated":
        module = xd.distribute_module(module, mesh)
    params, apply = xd.jax.from_module(module)
    wanted = {"tensor parallel": ("tp", None), "fully sharded": ("dp", None)}
    if how in wanted:
        assert params["0.weight"].sharding.spec == P(*wanted[how])
    x = jaxed(batch(8))
    if how != "plain":
        x = jax.device_put(x, NamedSharding(params["0.weight"].sharding.mesh, P("dp")))

    def loss(params: Any, x: Any) -> Any:
        return (apply(params, x) ** 2).sum()

    value, gradients = jax.jit(jax.value_and_grad(loss))(params, x)
    expected = reference(batch(8)).pow(2).sum()
    expected.backward()
    close(value, expected.detach().numpy(), 1e-4)
    close(gradients, {n: p.grad.numpy() for n, p in reference.named_parameters()}, 1e-4)
    if how in wanted:
        assert gradients["0.weight"].sharding.is_equivalent_to(params["0.weight"].sharding, 2)
        part = {**params, "0.weight": params["0.weight"][:4]}
        with pytest.raises(UnsupportedOpError, match="as a whole"):
            apply(part, x)


def test_training_on_a_mesh_is_training_on_the_cpu() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "tp"))
    module = mlp()
    params, apply = xd.jax.from_module(module)
    place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    params = {
        n: place(p, "tp") if n.startswith("0") else place(p, *[None, "tp"][: p.ndim])
        for n, p in params.items()
    }

    @jax.jit
    def step(params: Any, x: Any) -> Any:
        loss = lambda p: ((apply(p, x) - x) ** 2).mean()
        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for i in range(5):
        x = batch(8 + 8 * (i % 2))  # another batch size is another program
        params, value = step(params, place(jaxed(x), "dp"))
        optimizer.zero_grad()
        loss = (module(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        close(value, loss.detach().numpy())
    close(params, {n: p.detach().numpy() for n, p in module.named_parameters()})


# --- what changes --------------------------------------------------------------------------------


def test_other_shapes_and_dtypes() -> None:
    module = mlp()
    params, apply = xd.jax.from_module(module)
    run = jax.jit(apply)
    for rows in (1, 5, 0):
        close(run(params, jaxed(batch(rows))), module(batch(rows)).detach().numpy())
    close(run(params, jnp.ones((2, 3, 8))), module(torch.ones(2, 3, 8)).detach().numpy())
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    out = run(half, jaxed(batch()).astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    wanted = mlp().bfloat16()(batch().bfloat16()).float().detach().numpy()
    close(out.astype(jnp.float32), wanted, 2e-2)
    gradients = jax.grad(lambda p: run(p, jaxed(batch()).astype(jnp.bfloat16)).sum())(half)
    assert {g.dtype for g in gradients.values()} == {jnp.dtype(jnp.bfloat16)}
    with pytest.raises(RuntimeError):  # torch's: the types don't fit
        run(half, jaxed(batch()))


def test_a_module_in_double_precision() -> None:
    module = mlp().double()
    params, apply = xd.jax.from_module(module)
    assert params["0.weight"].dtype == jnp.float32  # as jnp.asarray
    close(apply(params, jaxed(batch())), module(batch().double()).detach().numpy())
    with jax.enable_x64(True):
        params, apply = xd.jax.from_module(module)
        out = jax.jit(apply)(params, jnp.asarray(batch().double().numpy()))
        assert out.dtype == jnp.float64
        close(out, module(batch().double()).detach().numpy(), 1e-12)


def test_the_module_may_change() -> None:
    module = mlp()
    params, apply = xd.jax.from_module(module)
    x = jaxed(batch())
    first = apply(params, x)
    module[1] = nn.Tanh()
    assert not np.allclose(apply(params, x), first)
    module.extra = nn.Linear(2, 2)
    with pytest.raises(KeyError, match=r"extra\.weight.*from_module"):
        apply(params, x)
    del module.extra, module[2]
    with pytest.raises(KeyError, match=r"2\.weight.*hasn't"):
        apply(params, x)
    # Nor do the module's own weights matter.
    module = mlp()
    params, apply = xd.jax.from_module(module)
    with torch.no_grad():
        module[0].weight.zero_()
    close(apply(params, x), first)
    assert type(module[0].weight) is nn.Parameter and module[0].weight.device.type == "cpu"


def test_programs_in_programs() -> None:
    inner, outer = mlp(), nn.Linear(8, 2)
    inner_params, inner_apply = xd.jax.from_module(inner)
    outer_params, outer_apply = xd.jax.from_module(outer)
    both = jax.jit(lambda p, q, x: outer_apply(q, jax.jit(inner_apply)(p, x)))
    gradient = jax.jit(jax.grad(lambda p, q, x: both(p, q, x).sum()))
    found = gradient(inner_params, outer_params, jaxed(batch()))
    outer(inner(batch())).sum().backward()
    close(found, {n: p.grad.numpy() for n, p in inner.named_parameters()})


def test_inside_of_each_other() -> None:
    """A torch function that calls a JAX program that calls a torch function."""
    module = mlp()
    params, apply = xd.jax.from_module(module)
    swish = xd.jax_function(lambda x: x * jax.nn.sigmoid(apply(params, x)))
    found = jax.jit(jax.grad(lambda x: xd.jax.call(swish, x).sum()))(jaxed(batch()))
    x = batch().requires_grad_()
    (x * torch.sigmoid(module(x))).sum().backward()
    assert x.grad is not None
    close(found, x.grad.numpy())


def test_a_compiled_step_before_and_after() -> None:
    module = mlp().to("xla")
    step = xd.compile(lambda x: module(x).sum())
    x = batch().to("xla")
    before = step(x).item()
    params, apply = xd.jax.from_module(module)
    close(jax.jit(apply)(params, jaxed(batch())).sum(), before)
    jax.grad(lambda p: apply(p, jaxed(batch())).sum())(params)
    assert step(x).item() == before
    assert not torch.compiler.is_compiling()


def test_one_module_in_several_threads() -> None:
    module = mlp()
    params, apply = xd.jax.from_module(module)
    wanted = {rows: module(batch(rows)).detach().numpy() for rows in range(1, 9)}
    failed: list[BaseException] = []

    def work(rows: int) -> None:
        try:
            program = jax.jit(lambda p, x: apply(p, x) * 1)
            for _ in range(3):
                close(program(params, jaxed(batch(rows))), wanted[rows])
            jax.grad(lambda p: program(p, jaxed(batch(rows))).sum())(params)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_an_exception_changes_nothing() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.LSTM(8, 8)
            self.fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.linear(x)[0]
            if self.fails:
                raise ZeroDivisionError("in the middle")
            return self.seen

    module = Fails()
    params, apply = xd.jax.from_module(module)
    before = {n: id(p) for n, p in module.named_parameters()}
    with pytest.raises(ZeroDivisionError):
        jax.jit(apply)(params, jaxed(batch()))
    assert {n: id(p) for n, p in module.named_parameters()} == before
    assert not hasattr(module, "seen") and not torch.compiler.is_compiling()
    assert all(p.device.type == "cpu" for p in module.linear._flat_weights)
    module.fails = False
    with pytest.warns(UserWarning, match="seen"):
        out = jax.jit(apply)(params, jaxed(batch()))
    close(out, module(batch()).detach().numpy())


# --- what would leak -----------------------------------------------------------------------------


def test_what_a_module_keeps_is_put_back() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.calls, self.last, self.history = 0, None, []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = self.linear(x)
            self.history.append(self.last)
            return self.last * 2

    module = Keeps()
    params, apply = xd.jax.from_module(module)
    with pytest.warns(UserWarning, match="last.*mutable=True"):
        jax.jit(apply)(params, jaxed(batch()))
    assert module.last is None and module.calls == 1
    (left,) = module.history
    with pytest.raises(DataDependentError, match="no value outside"):
        left.sum().item()


def test_writes_to_others_tensors_are_refused() -> None:
    total = torch.zeros(8, device="xla")
    with pytest.raises(UnsupportedOpError, match="from outside"):
        jax.jit(lambda x: xd.jax.call(lambda x: total.add_(x), x))(jnp.ones(8))
    assert total.tolist() == [0] * 8

    class Writes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(2)
            return super().forward(x)

    params, apply = xd.jax.from_module(Writes(8, 8))
    with pytest.raises(UnsupportedOpError, match="writes to its parameters weight"):
        apply(params, jaxed(batch()))


def test_no_tracer_is_left() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
    params, apply = xd.jax.from_module(module)

    def loss(params: Any, x: Any) -> Any:
        out, buffers = apply({**params, **apply.buffers}, x, rng=jax.random.key(0), mutable=True)
        return out.sum(), buffers

    with warnings.catch_warnings(), jax.checking_leaks():
        warnings.simplefilter("error")
        jax.jit(jax.grad(loss, has_aux=True))(params, jaxed(batch()))


def test_values_in_python_are_refused() -> None:
    with pytest.raises(DataDependentError, match="while JAX traces"):
        jax.jit(lambda x: xd.jax.call(lambda x: x if x.sum() > 0 else -x, x))(jnp.ones(3))


def test_what_has_no_arrays() -> None:
    with pytest.raises(TypeError, match="a module is wanted"):
        xd.jax.from_module(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOpError, match="lazy"):
        xd.jax.from_module(nn.LazyLinear(3))


def test_parameters_that_are_none_of_ours() -> None:
    other = nn.Linear(8, 8)
    with pytest.raises(UnsupportedOpError, match="a CPU tensor that requires grad"):
        jax.jit(lambda x: xd.jax.call(lambda x: x @ other.weight, x))(jaxed(batch()))


class _Elsewhere(nn.Module):
    """Reads its weight by another way than its attribute."""

    def __init__(self, way: str, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).to(device))
        weight, detached = self.weight, self.weight.detach()
        reads: dict[str, Any] = {
            "closure": lambda: weight,
            "detached": lambda: detached,
            "view": lambda: detached[:, 1:],
        }
        self.read = reads[way]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.read()).sum() + self.weight.sum()


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("way", ["closure", "detached", "view"])
def test_weights_that_are_reached_elsewhere(way: str, device: str) -> None:
    """There the module's own value is, which isn't that of params, and gets no gradient."""
    params, apply = xd.jax.from_module(_Elsewhere(way, device))
    with pytest.raises(UnsupportedOpError, match=r"another way|a CPU tensor"):
        apply(params, jaxed(batch(4, 4)))


class _Halves(nn.Module):
    """Two buffers in one memory, and one beside them."""

    def __init__(self, device: str, shared: bool) -> None:
        super().__init__()
        whole = torch.zeros(4).to(device)
        self.register_buffer("first", whole[:2])
        self.register_buffer("other", whole if shared else torch.zeros(4).to(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.add_(1)
        return x + self.other


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_buffers_in_one_memory(device: str) -> None:
    """A write to one would have to be seen in the other."""
    x = jnp.ones(4)
    _, apply = xd.jax.from_module(_Halves(device, shared=True))
    with pytest.raises(UnsupportedOpError, match="buffer first, whose memory other has"):
        apply({}, x, mutable=True)
    _, apply = xd.jax.from_module(_Halves(device, shared=False))
    result, buffers = apply({}, x, mutable=True)
    assert result.tolist() == [1] * 4 and buffers["first"].tolist() == [1, 1]


def test_xla_tensors_from_outside_that_require_grad() -> None:
    other = torch.ones(3, device="xla", requires_grad=True)
    with pytest.raises(UnsupportedOpError, match="would be a constant, and get no gradient"):
        xd.jax.call(lambda x: x * other, jnp.ones(3))
    close(xd.jax.call(lambda x: x * other.detach(), jnp.ones(3)), np.ones(3))


def test_hooks_that_look_at_grad_are_refused() -> None:
    module = mlp()
    hook = module[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    params, apply = xd.jax.from_module(module)
    x = jaxed(batch())
    close(apply(params, x), module(batch()).detach())
    with pytest.raises(UnsupportedOpError, match="register_post_accumulate_grad_hook"):
        jax.grad(lambda p: apply(p, x).sum())(params)
    hook.remove()
    module(batch()).sum().backward()
    found = jax.grad(lambda p: apply(p, x).sum())(params)
    for name, parameter in module.named_parameters():
        close(found[name], parameter.grad)
