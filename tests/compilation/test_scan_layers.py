"""`xd.scan_layers` against the Python loop over the same layers, which plain torch judges."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.planning.tpus import needs_libtpu
from xla_dtensor.errors import UnsupportedOpError


class Block(nn.Module):
    def __init__(self, width: int, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(p)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        h = self.down(torch.relu(self.up(self.norm(x)))) + self.shift
        return x + self.dropout(h) * scale


def one_by_one(layers: nn.ModuleList) -> Callable[..., Any]:
    def run(x: Any, *args: Any) -> Any:
        for layer in layers:
            x = layer(x, *args)
        return x

    return run


WIDTH = 16
HOW: dict[str, Callable[..., Any]] = {
    "loop": one_by_one,
    "scan": xd.scan_layers,
    "kept": functools.partial(xd.scan_layers, recompute=False),
    "offloaded": functools.partial(xd.scan_layers, offload=True),
    "kept and offloaded": functools.partial(xd.scan_layers, recompute=False, offload=True),
}
SCANS = [how for how in HOW if how != "loop"]


def replicated(model: nn.Module) -> Any:
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    xd.distribute_module(model, mesh)
    return lambda x: xd.distribute_tensor(x, mesh, [xd.Shard(0), xd.Replicate()])


def sharded(model: nn.Module) -> Any:
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))

    def part(name: str, module: nn.Module, mesh: Any) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            placements = [xd.Replicate(), xd.Shard(0)]
            laid_out = xd.distribute_tensor(p.data, mesh, placements)
            module.register_parameter(key, nn.Parameter(laid_out))

    xd.distribute_module(model, mesh, part)
    return lambda x: xd.distribute_tensor(x, mesh, [xd.Shard(0), xd.Replicate()])


def on_one_device(model: nn.Module) -> Any:
    model.to("xla")
    return lambda x: x.to("xla")


def fully_sharded(model: nn.Module) -> Any:
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
    model.to("xla")
    for layer in model:
        xd.fully_shard(layer, mesh=mesh)
    return lambda x: xd.from_device_values(list(x.chunk(8)), mesh)


def value(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    elif getattr(tensor, "varying", ()):
        return torch.stack(tensor.local_values()).mean(0)
    return tensor.cpu()


def trained(how: str, layout: Callable[..., Any], depth: int, steps: int = 3) -> list[Any]:
    torch.manual_seed(0)
    layers = nn.ModuleList(Block(WIDTH) for _ in range(depth))
    place = layout(layers)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    x = place(torch.randn(16, WIDTH))

    @xd.compile
    def step(x: Any) -> Any:
        loss = HOW[how](layers)(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [value(step(x)) for _ in range(steps)]
    assert step.compilations == 1
    return [*losses, *map(value, layers.state_dict().values())]


def with_torch(depth: int, steps: int = 3) -> list[Any]:
    torch.manual_seed(0)
    layers = nn.ModuleList(Block(WIDTH) for _ in range(depth))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    x, losses = torch.randn(16, WIDTH), []
    for _ in range(steps):
        loss = one_by_one(layers)(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in layers.state_dict().values())]


LAYOUTS = [on_one_device, replicated, sharded, fully_sharded]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("how", "layout"),
    [
        pytest.param(how, layout, marks=[pytest.mark.slow] * (how == "offloaded"))
        for how in SCANS
        for layout in LAYOUTS
    ],
)
def test_training_is_torchs(how: str, layout: Callable[..., Any]) -> None:
    for ours, torchs in zip(trained(how, layout, 3), with_torch(3), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=2e-5, atol=2e-5)


def gradients(how: str, p: float = 0.0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.ModuleList(Block(WIDTH, p) for _ in range(4))
    place = replicated(layers)
    x = place(torch.randn(8, WIDTH)).requires_grad_()
    scale = place(torch.rand(8, WIDTH)).requires_grad_()
    torch.manual_seed(3)

    @xd.compile
    def step() -> Any:
        loss = HOW[how](layers)(x, scale).square().mean()
        loss.backward()
        return loss.detach()

    step()
    again = step()  # gradients add up, other random numbers
    return [value(t) for t in (again, x.grad, scale.grad, *(q.grad for q in layers.parameters()))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("how", "p"), [("scan", 0.0), ("scan", 0.4), ("kept", 0.4), ("kept and offloaded", 0.4)]
)
def test_gradients_are_those_of_the_loop(how: str, p: float) -> None:
    """Of arguments, too; and each layer drops out what it does in the loop."""
    for ours, loops in zip(gradients(how, p), gradients("loop", p), strict=True):
        torch.testing.assert_close(ours, loops, rtol=1e-5, atol=1e-6)


def test_outside_of_a_step_it_is_the_loop() -> None:
    layers = nn.ModuleList(Block(WIDTH) for _ in range(3))
    x = torch.randn(4, WIDTH)
    assert torch.equal(xd.scan_layers(layers)(x), one_by_one(layers)(x))  # the CPU's
    expected = one_by_one(layers)(x)
    layers.to("xla")
    torch.testing.assert_close(xd.scan_layers(layers)(x.to("xla")).cpu(), expected)


def test_what_layers_read_from_elsewhere_is_an_input() -> None:
    """A tensor that is no parameter of the layers: another value needs no other program."""
    factor = torch.tensor(2.0, device="xla")

    class Times(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    layers = nn.ModuleList(Times() for _ in range(3))
    step = xd.compile(lambda x: xd.scan_layers(layers)(x))
    x = torch.ones(4, device="xla")
    assert step(x).tolist() == [8.0] * 4
    factor.fill_(3.0)
    assert step(x).tolist() == [27.0] * 4
    assert step.compilations == 1


def test_a_backward_outside_of_the_step() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Block(WIDTH) for _ in range(3))
    cpu = copy.deepcopy(layers)
    place = replicated(layers)
    x = torch.randn(8, WIDTH)
    forward = xd.compile(lambda x: xd.scan_layers(layers)(x))
    forward(place(x)).square().mean().backward()
    one_by_one(cpu)(x).square().mean().backward()
    for p, q in zip(layers.parameters(), cpu.parameters(), strict=True):
        torch.testing.assert_close(value(p.grad), q.grad, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_no_layer_uses_gets_no_gradient() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = (nn.Parameter(torch.ones(4)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.used

    layers = nn.ModuleList(Half() for _ in range(3)).to("xla")
    xd.compile(lambda x: xd.scan_layers(layers)(x).sum().backward())(torch.ones(4, device="xla"))
    assert all(layer.unused.grad is None for layer in layers)
    assert all(layer.used.grad.tolist() == [1.0] * 4 for layer in layers)


def test_a_shared_layer_gets_the_sum() -> None:
    layer = nn.Linear(4, 4, bias=False)
    cpu = copy.deepcopy(layer)
    layer.to("xla")
    x = torch.randn(2, 4)
    xd.compile(lambda x: xd.scan_layers([layer] * 3)(x).sum().backward())(x.to("xla"))
    one_by_one([cpu] * 3)(x).sum().backward()  # type: ignore[arg-type]
    torch.testing.assert_close(layer.weight.grad.cpu(), cpu.weight.grad)


def counted(depth: int, make_optimizer: Any = None) -> tuple[int, int]:
    """Equations of the traced step, and instructions of the loops' bodies, without those that bring
    parameters together and take gradients apart."""
    layers = nn.ModuleList(Block(WIDTH) for _ in range(depth)).to("xla")
    optimizer = None if make_optimizer is None else make_optimizer(layers.parameters())

    def step(x: Any) -> Any:
        loss = xd.scan_layers(layers)(x).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    jaxpr = xd.compile(step).looked_at((torch.ones(8, WIDTH, device="xla"),), {}, _jaxpr)
    text = xd.compile(step).lower(torch.ones(8, WIDTH, device="xla")).as_text()
    return len(jaxpr.eqns), text.count("stablehlo.dot_general")


def _jaxpr(program: Any) -> Any:
    return program.jaxpr


def test_the_program_does_not_grow_with_the_depth() -> None:
    (equations, products), (deep, deep_products) = counted(4), counted(64)
    assert deep <= 1.05 * equations and deep_products == products


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_does_not_either(optimizer: Any) -> None:
    made = functools.partial(optimizer, foreach=True)  # the default of tensors on a mesh
    assert counted(4, made) == counted(12, made)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x


class Doing(nn.Module):
    """A linear layer that does something besides, with an attribute of its own."""

    def __init__(self, do: Callable[..., Any], own: Any = None) -> None:
        super().__init__()
        self.linear, self.do, self.own = nn.Linear(4, 4), do, own

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        y = self.do(self, x, *args)
        return self.linear(x) if y is None else y


def doing(do: Callable[..., Any]) -> list[nn.Module]:
    return [Doing(do) for _ in range(2)]


def own_of(*own: Any) -> list[nn.Module]:
    return [Doing(_nothing, value) for value in own]


def _nothing(layer: Any, x: Any, *args: Any) -> None:
    pass


class Setting:
    def __init__(self, value: float) -> None:
        self.value = value


def times(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


shared = nn.Linear(4, 4)


def linear(out: int = 4, bias: bool = True) -> nn.Module:
    return nn.Linear(4, out, bias=bias)


def with_a_forward_of_its_own(layer: nn.Module) -> nn.Module:
    layer.forward = times(3)
    return layer


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([linear(), linear(bias=False)], r"layer 1 differs from the first one in bias"),
        ([linear(), nn.Sequential(linear())], r"in the class of itself"),
        ([nn.Dropout(0.1), nn.Dropout(0.2)], r"in itself\.p: 0\.2 in place of 0\.1"),
        ([linear(6), linear(6)], r"takes \[2, 4\] torch\.float32 and gives \[2, 6\]"),
        ([Counting(), Counting()], r"writes to a tensor of shape \[\]"),
        # attributes that are no plain values
        ([nn.Conv1d(2, 2, 3, padding=d, dilation=d) for d in (1, 2)], r"itself\.padding: \(2,\)"),
        (own_of(torch.relu, torch.tanh), r"itself\.own"),
        (own_of(times(2), times(3)), r"itself\.own"),
        (own_of(functools.partial(torch.mul, 2), functools.partial(torch.mul, 3)), r"itself\.own"),
        (own_of({"a": [1.0]}, {"a": [2.0]}), r"\{'a': \[2\.0\]\} in place of \{'a': \[1\.0\]\}"),
        (own_of(Setting(1.0), Setting(2.0)), r"itself\.own"),
        (own_of([torch.ones(1)], [torch.ones(1)]), r"itself\.own"),
        (own_of([linear()], [linear()]), r"itself\.own"),
        (own_of(1, True), r"itself\.own"),
        (own_of(None, torch.ones(1)), r"itself\.own"),
        ([linear(), with_a_forward_of_its_own(linear())], r"itself\.forward"),
        ([with_a_forward_of_its_own(linear()), linear()], r"itself\.forward"),
        # what each layer of the Python loop would do, and the loop's body can't
        (doing(lambda layer, x, *_: setattr(layer, "own", x)), r"the layer assigns own"),
        (doing(lambda layer, x, *_: setattr(layer, "new", x)), r"the layer assigns new"),
        (
            doing(lambda layer, x, *_: x.add_(1)),
            r"writes to its input of shape",
        ),
        (doing(lambda layer, x, total, _: total.add_(1)), r"writes to a tensor of shape \[3\]"),
        (doing(lambda layer, x, _, seen: seen.append(x)), r"changes a list"),
    ],
)
def test_what_can_not_be_a_loop(layers: list[nn.Module], says: str) -> None:
    for layer in layers:
        layer.to("xla")
    takes = isinstance(layers[0], Doing)

    @xd.compile
    def step(x: Any) -> Any:
        args = (torch.zeros(3, device="xla"), []) if takes else ()
        return xd.scan_layers(layers)(x, *args)

    for _ in range(2):
        with pytest.raises(UnsupportedOpError, match=says):
            step(torch.ones(2, 4, device="xla"))
    assert not hasattr(layers[0], "new")
    # and nothing of the trace is left
    assert all(torch.isfinite(t.cpu()).all() for t in layers[0].state_dict().values())


def test_attributes_that_mean_the_same() -> None:
    """Functions of one text, tables, objects and parts of each layer's own are equal."""
    values: list[Callable[[Any], Any]] = [
        lambda layer: times(2),
        lambda layer: functools.partial(torch.mul, 2),
        lambda layer: {"a": [1.0, (2, None)]},
        lambda layer: Setting(1.0),
        lambda layer: layer.linear.forward,
        lambda layer: [layer.linear, layer.linear.weight, shared],
    ]
    x = torch.ones(2, 4, device="xla")
    for make in values:
        layers = [Doing(_nothing).to("xla") for _ in range(3)]
        for layer in layers:
            layer.own = make(layer)
        found = xd.compile(lambda x, layers=layers: xd.scan_layers(layers)(x))(x)
        torch.testing.assert_close(found.cpu(), nn.Sequential(*layers)(x).detach().cpu())


def test_a_loop_under_autocast() -> None:
    """Backward, which is called outside of the block, computes in its precision again, and rounds
    the gradients of what was cast as CPU torch does."""
    torch.manual_seed(0)
    on_cpu = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
    with torch.autocast("cpu", torch.bfloat16):
        expected = on_cpu(torch.ones(4, WIDTH))
    expected.square().sum().backward()
    wanted = [expected.detach(), *(p.grad for p in on_cpu.parameters())]
    for how in HOW.values():
        torch.manual_seed(0)
        layers = nn.ModuleList(Block(WIDTH) for _ in range(3)).to("xla")

        @xd.compile
        def step(x: Any, how: Any = how, layers: Any = layers) -> Any:
            with torch.autocast("xla", torch.bfloat16):
                y = how(layers)(x)
            y.square().sum().backward()
            return y.detach()

        y = step(torch.ones(4, WIDTH, device="xla"))
        found = [y.cpu(), *(p.grad.cpu() for p in layers.parameters())]
        for mine, theirs in zip(found, wanted, strict=True):
            most = theirs.abs().max().item()  # a part of bfloat16's precision, eight bits
            torch.testing.assert_close(mine, theirs, atol=2**-8 * most, rtol=2**-7)


def test_gradients_that_would_be_lost() -> None:
    """Of what a layer reads that is neither its own nor its argument."""
    scale = nn.Parameter(torch.full((4,), 1.5, device="xla"))

    def step(x: Any, layers: Any, *args: Any) -> Any:
        xd.scan_layers(layers)(x, *args).sum().backward()

    x = torch.ones(2, 4, device="xla")
    hidden: list[Any] = []
    for read in (lambda: scale, lambda: hidden[0]):
        layers = [
            Doing(lambda layer, x, *_, read=read: layer.linear(x) * read()).to("xla")
            for _ in range(2)
        ]

        @xd.compile
        def lost(x: Any, layers: Any = layers) -> None:
            hidden[:] = [scale * 2]
            step(x, layers)

        with pytest.raises(UnsupportedOpError, match=r"of shape \[4\] that needs a gradient"):
            lost(x)
        assert scale.grad is None
    layers = [
        Doing(lambda layer, x, tables: layer.linear(x) * tables["scale"]).to("xla")
        for _ in range(2)
    ]
    xd.compile(lambda x: step(x, layers, {"scale": scale}))(x)
    expected = scale.detach().cpu().requires_grad_()
    y = x.cpu()
    for layer in layers:
        linear = layer.linear
        y = nn.functional.linear(y, linear.weight.detach().cpu(), linear.bias.detach().cpu())
        y = y * expected
    y.sum().backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad.cpu(), expected.grad)


@pytest.mark.parametrize("what", ["mode", "argument"])
def test_a_change_between_forward_and_backward(what: str) -> None:
    layers = nn.ModuleList(Block(WIDTH, 0.5) for _ in range(2)).to("xla")

    @xd.compile
    def step(x: Any) -> None:
        scale = torch.ones(WIDTH, device="xla")
        y = xd.scan_layers(layers)(x, scale)
        if what == "mode":
            layers.eval()
        else:
            scale.mul_(2)
        y.sum().backward()

    with pytest.raises(UnsupportedOpError, match="training" if what == "mode" else "written to"):
        step(torch.ones(4, WIDTH, device="xla"))


def test_a_plan_of_a_loop() -> None:
    """Each layer's collectives count as often as there are layers."""

    def planned(depth: int) -> Any:
        with xd.abstract("cpu:8"):
            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            layers = nn.ModuleList(Block(WIDTH) for _ in range(depth))
            xd.distribute_module(layers, mesh, _tensor_parallel)
            x = torch.randn(16, WIDTH)
            x = xd.distribute_tensor(x, mesh, [xd.Shard(0), xd.Replicate()])
            return xd.plan(lambda x: xd.scan_layers(layers)(x).square().mean().backward(), x)

    small, large = planned(4), planned(16)
    assert large.flops == 4 * small.flops
    forward = [
        sum(row.bytes for row in report.collectives if "tp" in row.dims and "down" in row.module)
        for report in (small, large)
    ]
    assert forward[1] == 4 * forward[0] > 0


def test_the_gradient_of_a_sum_is_whole() -> None:
    """A layer's result is a sum over devices, and its gradient is not: operations of backward are
    laid out by what they are told of it."""

    def check(grad: Any) -> None:
        if grad.placements != (xd.Shard(0), xd.Replicate()):
            raise ValueError(f"the gradient is {grad.placements}")

    class Row(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            assert any(p.is_partial() for p in y.placements)
            if y.requires_grad:
                y.register_hook(check)
            return y

    with xd.abstract("cpu:8"):
        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        layers = nn.ModuleList(Row(WIDTH, WIDTH, bias=False) for _ in range(3))
        for layer in layers:
            weight = layer.weight.data
            laid_out = xd.distribute_tensor(weight, mesh, [xd.Replicate(), xd.Shard(1)])
            layer.weight = nn.Parameter(laid_out)
        x = xd.distribute_tensor(torch.randn(8, WIDTH), mesh, [xd.Shard(0), xd.Replicate()])
        xd.plan(lambda x: xd.scan_layers(layers)(x).square().mean().backward(), x)


def test_a_plan_of_a_loop_that_reads_from_elsewhere() -> None:
    """What has no value is an input of the program, too, where the body of a loop reads it."""
    with xd.abstract("cpu:8"):
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        table = xd.distribute_tensor(torch.randn(WIDTH), mesh, None)

        class Times(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * table

        layers = nn.ModuleList(Times() for _ in range(3))
        x = xd.distribute_tensor(torch.randn(8, WIDTH), mesh, [xd.Shard(0)])
        found = xd.plan(lambda x: xd.scan_layers(layers)(x).sum(), x)
    names = {one.name: one.bytes for one in found.inputs}
    assert names == {"argument 0": 4 * WIDTH, "table": 4 * WIDTH}


def _tensor_parallel(name: str, module: nn.Module, mesh: Any) -> None:
    dim = {"up": 0, "down": 1}.get(name.rpartition(".")[2])
    for key, p in list(module.named_parameters(recurse=False)):
        cut = xd.Replicate() if dim is None or dim >= p.ndim else xd.Shard(dim)
        laid_out = xd.distribute_tensor(p.data, mesh, [xd.Replicate(), cut])
        module.register_parameter(key, nn.Parameter(laid_out))


# --- what is kept for backward -------------------------------------------------------------------


def products(**options: Any) -> int:
    """How many matrix products the compiled program has."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Block(WIDTH) for _ in range(4))
    x = replicated(layers)(torch.randn(16, WIDTH))

    @xd.compile
    def step(x: Any) -> Any:
        loss = xd.scan_layers(layers, **options)(x).square().mean()
        loss.backward()
        return loss

    return len(re.findall(r" dot\(", step.lower(x).compile().as_text()))


def test_what_is_kept_is_not_computed_again() -> None:
    """Two products forward and four backward; in a loop that computes forward again, one of its
    two besides (the second one's result isn't needed)."""
    assert products(recompute=False) == 6
    assert products() == 7


class Remembers(nn.Module):
    """Saves a tensor from outside, its weight, its input, its result, a view, one tensor twice."""

    def __init__(self, outside: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.outside = [outside]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(x * self.weight) * self.outside[0]
        first, second = (h * h).chunk(2, dim=-1)
        mixed = torch.cat([first * second, second.exp() / (1 + first)], dim=-1)
        return x + checkpoint(torch.tanh, mixed * h, use_reentrant=False)


@pytest.mark.parametrize("offload", [False, True])
def test_what_autograd_saves(offload: bool) -> None:
    torch.manual_seed(0)
    outside, x = torch.randn(WIDTH), torch.randn(8, WIDTH)
    plain = nn.ModuleList(Remembers(outside) for _ in range(3))
    ours = copy.deepcopy(plain).to("xla")
    outside = outside.to("xla")
    for layer in ours:
        layer.outside = [outside]
    wanted = one_by_one(plain)(x).square().sum()
    wanted.backward()

    @xd.compile
    def step(x: Any) -> Any:
        loss = xd.scan_layers(ours, recompute=False, offload=offload)(x).square().sum()
        loss.backward()
        return loss.detach()

    for _ in range(2):
        torch.testing.assert_close(step(x.to("xla")).cpu(), wanted.detach(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu() / 2, theirs.grad, rtol=1e-5, atol=1e-5)


def test_a_layer_that_computes_something_else_in_backward() -> None:
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).to("xla")
    calls = [0]

    def widened(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return torch.cat([x] * calls[0], dim=-1).sin()[:, :WIDTH]

    for layer in layers:
        layer.register_forward_hook(lambda module, args, result: widened(result))

    @xd.compile
    def step(x: Any) -> Any:
        loss = xd.scan_layers(layers, recompute=False)(x).cos().sum()
        loss.backward()
        return loss

    with pytest.raises(xd.UnsupportedOpError, match="computes something else than in forward"):
        step(torch.ones(2, WIDTH, device="xla"))


def test_without_a_gradient_nothing_is_kept() -> None:
    layers = nn.ModuleList(Block(WIDTH) for _ in range(3))
    x = replicated(layers)(torch.randn(16, WIDTH))

    @xd.compile
    @torch.no_grad()
    def step(x: Any) -> Any:
        return xd.scan_layers(layers, recompute=False, offload=True)(x)

    wanted = one_by_one(layers)(x)
    torch.testing.assert_close(value(step(x)), value(wanted), rtol=1e-5, atol=1e-5)


@needs_libtpu
def test_what_is_kept_rests_in_the_hosts_memory() -> None:
    """Of TPUs; simulated devices have one memory."""

    def report(**options: Any) -> Any:
        with xd.abstract("v5e:2x4"):
            layers = nn.ModuleList(Block(WIDTH) for _ in range(4))
            x = replicated(layers)(torch.randn(4096, WIDTH))

            def step(x: Any) -> Any:
                loss = xd.scan_layers(layers, **options)(x).square().mean()
                loss.backward()
                return loss.detach()

            return xd.plan(step, x)

    inputs = 4 * 4096 // 2 * WIDTH * 4
    plain, offloaded, kept = report(), report(offload=True), report(recompute=False)
    assert (plain.memory.host, offloaded.memory.host) == (0, inputs)
    # Two products forward, four backward, and one of the two once more.
    assert kept.flops / plain.flops == pytest.approx(6 / 7)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_hook_of_a_parameter_is_its_layers_alone(which: int, recompute: bool) -> None:
    """The body of the loop is the first layer's code, on all layers."""
    grads = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).to(device)
        layers[which].weight.register_hook(lambda grad: grad * 3)
        x = torch.ones(2, 8, device=device)

        def step(x: Any, layers: Any = layers, device: str = device) -> None:
            if device == "xla":
                y = xd.scan_layers(layers, recompute=recompute)(x)
            else:
                y = nn.Sequential(*layers)(x)
            y.square().sum().backward()

        run = xd.compile(step) if device == "xla" else step
        run(x), run(x)
        grads.append([p.grad.cpu() for p in layers.parameters()])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("how", HOW)
def test_two_backward_passes_over_one_graph(how: str) -> None:
    """As `loss.backward(retain_graph=True)` of one loss, then of another one."""
    torch.manual_seed(0)
    plain = nn.ModuleList(Block(WIDTH) for _ in range(3))
    layers, x = copy.deepcopy(plain).to("xla"), torch.randn(4, WIDTH)

    def step(run: Callable[..., Any], x: Any, retain: bool) -> Any:
        y = run(x)
        first, second = y.sum(), y.square().mean()
        first.backward(retain_graph=retain)
        second.backward()
        return first.detach()

    step(one_by_one(plain), x, True)
    xd.compile(lambda x: step(HOW[how](layers), x, True))(x.to("xla"))
    for p, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), expected.grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        xd.compile(lambda x: step(HOW[how](layers), x, False))(x.to("xla"))
