"""xla tensors of users' subclasses of ``torch.Tensor``, by what torch does on the CPU."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import default_collate

import xla_dtensor as xd
from xla_dtensor.errors import UnsupportedOpError


class Image(torch.Tensor):
    """With torch's own ``__torch_function__``: what is computed of it is of its class."""


class Label(torch.Tensor):
    """As torchvision's: what is computed of it is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert cls is Label and Image not in types
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(torch.Tensor) if isinstance(result, Label) else result


class Tagged(torch.Tensor):
    """As fastai's: made by its own ``__new__``; all that is kept on one tensor goes on to the next,
    by the whole ``__dict__`` or what is in it."""

    def __new__(cls, data: Any, tag: int = 0) -> Any:
        result = torch.as_tensor(data).as_subclass(cls)
        result.tag = tag
        return result

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made = getattr(self, "made", 0) + 1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        if isinstance(result, Tagged) and first is not None:
            if func is torch.Tensor.mul:
                result.__dict__.update(first.__dict__)
            else:
                result.__dict__ = copy.copy(first.__dict__)
        return result


class Weight(torch.nn.Parameter):
    """A subclass of a class of torch's."""


def described(value: Any) -> Any:
    """What of a result has to be the same."""
    if isinstance(value, torch.Tensor):
        name = type(value).__name__.replace("XLATensor", "Tensor")
        plain = value.detach().cpu().as_subclass(torch.Tensor)
        kept = {k: v for k, v in vars(value).items() if k in ("tag", "made", "mark")}
        is_parameter = isinstance(value, torch.nn.Parameter)
        return name, value.requires_grad, value.is_leaf, is_parameter, kept, plain.tolist()
    return [described(v) for v in value] if isinstance(value, list | tuple) else value


def saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False, **options)


def marked(x: Any) -> Any:
    x.mark = 3
    return [x, saved(x), pickle.loads(pickle.dumps(x)), copy.copy(x)]


def written(y: Any, x: Any) -> Any:
    """Writes are seen on both sides."""
    plain = x.detach().clone()
    shown = plain.as_subclass(type(y))
    shown.add_(1)
    plain[0] = 5
    return [plain, shown, shown.mul_(2)]


def trained(y: Any, x: Any) -> Any:
    leaf = x.detach().clone().as_subclass(type(y))
    leaf.requires_grad_()
    (leaf * leaf).sum().backward()
    return [leaf, leaf.grad, type(leaf.grad) is type(leaf)]


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda y, x: [y, type(y).__name__, isinstance(y, torch.Tensor)],
    "arithmetic": lambda y, x: [y + x, x + y, y @ x.T, F.linear(y, x), torch.cat([x, y]), y > 0],
    "copies": lambda y, x: [y.clone(), y.detach(), y.double(), y.new_zeros(3), torch.ones_like(y)],
    "views": lambda y, x: [y[0], y.T, y.view(-1), *y.unbind(), y[x > 0], y[:, 1:2], *y.split(1)],
    "several": lambda y, x: [list(y.max(0)), y.sum(), y.mean(0), y.softmax(-1), torch.relu(y)],
    "to the CPU": lambda y, x: [y.detach().cpu(), y.detach().to("cpu")],
    "values": lambda y, x: [y.tolist(), y.sum().item(), y.detach().cpu().numpy().tolist()],
    "again": lambda y, x: [y.as_subclass(torch.Tensor), y.as_subclass(Image), y.as_subclass(Label)],
    "its own class": lambda y, x: [x.as_subclass(type(y)), x.cpu().as_subclass(type(y))],
    "made": lambda y, x: [
        torch.Tensor._make_subclass(type(y), x, True),
        torch.Tensor._make_subclass(Label, y),
        torch.Tensor._make_subclass(Weight, x, True),
        Image(x),
    ],
    "made by itself": lambda y, x: [
        (one := Tagged(x, 2)),
        one + 1,
        one * 2,
        x + one,
        type(one)(x, 3),
        type(one)(x.cpu(), 4),
    ],
    "written": written,
    "trained": trained,
    "out=": lambda y, x: torch.add(x.detach(), 1, out=torch.zeros_like(y.detach())),
    "marked": lambda y, x: marked(y.detach()),
    "saved": lambda y, x: [saved(y), pickle.loads(pickle.dumps(y))],
    "a parameter": lambda y, x: torch.nn.Parameter(x.as_subclass(Image)),
    "looked up": lambda y, x: [{type(y): 1}[Image if isinstance(y, Image) else Label]],
    "its data": lambda y, x: [y.data, y.shape, y.stride(), y.dtype],
    "its base": lambda y, x: y._base is None,
    "gradients": lambda y, x: torch.autograd.grad((y * y).sum(), x) if x.requires_grad else None,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("cls", [Image, Label])
def test_what_is_what(cls: type, requires_grad: bool, case: str) -> None:
    value = torch.arange(12.0).reshape(3, 4) - 4
    found = []
    for device in ("cpu", "xla"):
        x = value.clone().to(device).requires_grad_(requires_grad)
        found.append(described(CASES[case](x.as_subclass(cls), x)))
    assert found[1] == found[0]


def test_isinstance() -> None:
    y = torch.ones(2, device="xla").as_subclass(Image)
    assert isinstance(y, Image) and isinstance(y, xd.XLATensor) and y.device.type == "xla"
    assert type(y) == Image and type(y) != Label  # noqa: E721
    assert type(y.clone()) is type(y) and type(y).__qualname__ == "Image"
    assert type(y).__module__ == Image.__module__ and repr(y).startswith("Image([1., 1.]")


def test_deepcopy() -> None:
    """torch's own raises for such classes; ours keep what is kept on them."""
    y = torch.ones(2, device="xla").as_subclass(Image).requires_grad_()
    y.mark = [1]
    made = copy.deepcopy({"a": y, "b": y})["a"]
    assert isinstance(made, Image) and made.requires_grad and made.is_leaf
    assert made.mark == [1] and made.mark is not y.mark
    made.data.add_(1)
    assert y.tolist() == [1, 1]


def test_saved_tensors_come_back_elsewhere() -> None:
    y = torch.ones(2, device="xla").as_subclass(Image)
    y.mark = 3
    made = saved(y, map_location="cpu")
    assert type(made) is Image and made.device.type == "cpu" and made.mark == 3


@pytest.mark.parametrize("as_copy", [False, True])
def test_what_is_kept_of_one_tensor_is_not_its_memory(as_copy: bool) -> None:
    """Libraries assign a whole ``__dict__``, also of plain tensors."""
    x, y = torch.zeros(2, device="xla"), torch.ones(3, device="xla").as_subclass(Image)
    x.mark = 3
    for target, source in ((y, x), (x, y), (torch.full((1,), 2.0, device="xla"), x)):
        before = target.tolist()
        target.__dict__ = copy.copy(source.__dict__) if as_copy else source.__dict__
        assert target.mark == 3 and target.tolist() == before
        target.add_(1)
    assert x.tolist() == [1, 1] and y.tolist() == [2, 2, 2]
    assert set(vars(y)) == {"mark"}


def test_swapped() -> None:
    a = torch.ones(2, device="xla").as_subclass(Image)
    b = torch.zeros(3, device="xla").as_subclass(Label)
    a.mark, c = 1, torch.full((1,), 7.0, device="xla")
    torch.utils.swap_tensors(a, b)
    assert isinstance(a, Label) and a.tolist() == [0, 0, 0] and not vars(a)
    assert isinstance(b, Image) and b.tolist() == [1, 1] and b.mark == 1
    torch.utils.swap_tensors(b, c)
    assert type(b) is xd.XLATensor and b.tolist() == [7]
    assert isinstance(c, Image) and c.tolist() == [1, 1] and c.mark == 1


def test_a_module_moves() -> None:
    """A parameter of a subclass stays the object that it is, and of its class."""
    model = torch.nn.Linear(3, 2)
    model.weight = torch.nn.Parameter(torch.ones(2, 3).as_subclass(Tagged))
    model.weight.tag = 5
    weight, x = model.weight, torch.ones(1, 3)
    wanted = model(x).detach().tolist()
    for device in ("xla", "cpu", "xla"):
        model.to(device)
        assert model.weight is weight and isinstance(weight, Tagged) and weight.tag == 5
        assert weight.device.type == device
        torch.testing.assert_close(model(x.to(device)).tolist(), wanted)
    assert model.double().weight.dtype == torch.float64 and isinstance(model.weight, Tagged)


class Manifold(torch.nn.Parameter):
    """As geoopt's: what is computed of it is plain, ``.to()`` too; its optimizer asks for it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, data: Any, radius: float = 1.0) -> Any:
        made = torch.Tensor._make_subclass(cls, data, True)
        made.radius = radius
        return made


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_a_parameter_of_a_class_of_its_own_moves(in_a_graph: bool) -> None:
    """It was a plain parameter on the devices, and was trained as one."""
    model = torch.nn.Linear(3, 2)
    model.weight = Manifold(torch.ones(2, 3), 5.0)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1.0), torch.ones(1, 3)
    loss = model(x).sum() if in_a_graph else None
    for device in ("xla", "cpu", "xla"):
        model.to(device)
        assert isinstance(model.weight, Manifold) and model.weight.radius == 5
        assert model.weight.device.type == device and model.weight.requires_grad
        assert [p is model.weight for p in model.parameters()] == [True, False]
        assert optimizer.param_groups[0]["params"][0] is model.weight
        model(x.to(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.tolist() == [[-2.0] * 3] * 2
    assert (
        isinstance(copy.deepcopy(model).weight, torch.nn.Parameter)
        and (loss is not None) == in_a_graph
    )


def test_collated() -> None:
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[Image] = lambda batch, *, collate_fn_map=None: len(batch)
    try:
        images = [torch.ones(2, device="xla").as_subclass(Image)] * 3
        assert default_collate(images) == 3
    finally:
        del default_collate_fn_map[Image]


def test_torch_function_modes_are_not_told() -> None:
    """As on the CPU: ``as_subclass`` is none of the functions that are overridden."""
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, device="xla")
    with Mode():
        y = x.as_subclass(Image)
        torch.Tensor._make_subclass(Image, x)
    assert isinstance(y, Image) and not seen


def test_hooks_and_second_gradients() -> None:
    seen = []
    for device in ("cpu", "xla"):
        x = torch.ones(2, device=device, requires_grad=True)
        y = x.as_subclass(Image)
        y.register_hook(lambda grad: seen.append(grad.tolist()))
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        grad.sum().backward()
        seen.append(x.grad.tolist())
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@pytest.mark.parametrize("cls", [Image, Label])
def test_on_a_mesh(mesh_2x4: DeviceMesh, cls: type) -> None:
    value = torch.arange(32.0).reshape(8, 4)
    placements = (xd.Shard(0), xd.Replicate())
    x = xd.distribute_tensor(value, mesh_2x4, placements).requires_grad_()
    y = x.as_subclass(cls)
    assert isinstance(y, cls) and isinstance(y, xd.XLAShardedTensor) and y.placements == placements
    z = y * 2
    assert isinstance(z, cls) == (cls is Image) and z.placements == placements
    assert isinstance(y.cpu(), cls) == (cls is Image)
    made = saved(x.detach().as_subclass(cls))
    assert isinstance(made, cls) and made.placements == placements
    assert isinstance(copy.deepcopy(x.detach().as_subclass(cls)), cls)
    (y * y).sum().backward()
    assert torch.equal(x.grad.full_tensor().cpu(), 2 * value)
    # What is no function of torch's has plain results.
    assert type(y.redistribute(placements=[xd.Replicate()] * 2)) is xd.XLAShardedTensor
    assert type(y.full_tensor()) is xd.XLATensor


def test_per_device(mesh_2x4: DeviceMesh) -> None:
    y = xd.collectives.axis_index(mesh_2x4, "tp").as_subclass(Image)
    assert isinstance(y + 1, Image) and (y + 1).varying == ("tp",)
    assert [int(v) for v in y.local_values()] == [0, 1, 2, 3] * 2


def test_with_tensors_on_the_cpu() -> None:
    x, on_cpu = torch.ones(2, device="xla"), torch.full((2,), 2.0).as_subclass(Image)
    assert isinstance(x + on_cpu, Image) and (x + on_cpu).tolist() == [3, 3]
    assert isinstance(x.as_subclass(Image) + torch.ones(2), Image)


class Slotted(torch.Tensor):
    """Has memory of its own."""

    __slots__ = ("slot",)


class Dispatching(torch.Tensor):
    """Computes itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_refused() -> None:
    x = torch.ones(2, device="xla")
    with pytest.raises(UnsupportedOpError, match=r"can't be a Slotted .*no __slots__"):
        x.as_subclass(Slotted)
    with pytest.raises(UnsupportedOpError, match=r"can't be a Dispatching.*_make_wrapper_subclass"):
        x.as_subclass(Dispatching)
    for cls in (int, 3):
        with pytest.raises(TypeError, match=r"derives from torch\.Tensor"):
            x.as_subclass(cls)  # type: ignore[arg-type]


# What a step reads is found by the names in its code.
STEPS: dict[str, Callable[[Any], Any]] = {
    "_grad_hook": lambda x: x * x._grad_hook,
    "_cache": lambda x: x * x._cache,
    "_local": lambda x: x * x._local,
    "_alive": lambda x: x * x._alive,
    "_kept": lambda x: x * x._kept,
    "tag": lambda x: x * x.tag,
}


@pytest.mark.parametrize("name", list(STEPS))
def test_attributes_of_the_users_are_theirs(name: str) -> None:
    """Copied with the tensor, and compared by the steps that read them."""
    w = torch.ones(3).to("xla")
    setattr(w, name, 1)
    assert getattr(copy.deepcopy(w), name) == 1
    step = xd.compile(STEPS[name])
    assert step(w).tolist() == [1, 1, 1]
    setattr(w, name, 5)
    assert step(w).tolist() == [5, 5, 5] and w[1:].tolist() == [1, 1]


def test_a_hook_that_its_tensor_keeps(mesh_2x4: DeviceMesh) -> None:
    w = xd.distribute_tensor(torch.ones(4, 4), mesh_2x4, [Shard(0), Replicate()]).requires_grad_()
    w._grad_hook = w.register_hook(lambda grad: grad * 2)

    def step() -> None:
        (w * 1.0).sum().backward()

    run, found = xd.compile(step), []
    for _ in range(2):
        run()
        found.append(w.grad.full_tensor().sum().item())
        w.grad = None
        w._grad_hook.remove()
    assert found == [32, 16]
