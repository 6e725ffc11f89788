"""``torch.jit.trace``, ``add_graph`` and ``torch.onnx.export`` of modules on the device."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from xla_dtensor.errors import UnsupportedOpError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")


class Net(nn.Module):
    """With what a module may keep tensors in, a shared layer among it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(8, 8)
        self.again = self.last
        self.shift = torch.ones(8)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm(self.first(x)))
        return self.again(self.last(y)) + self.shift + torch.arange(8, device=x.device)

    def first_alone(self, x: Any) -> Any:
        return self.first(x)


@pytest.fixture
def nets() -> tuple[Net, Net, torch.Tensor]:
    """One on the CPU, the same on the device, and an input."""
    torch.manual_seed(0)
    net = Net().eval()
    on_device = copy.deepcopy(net).to("xla")
    on_device.shift = net.shift.to("xla")
    return net, on_device, torch.randn(2, 3, 8, 8)


def traced(*args: Any, **kwargs: Any) -> Any:
    with pytest.warns(UserWarning, match="a copy on the CPU"):
        return torch.jit.trace(*args, **kwargs)


def test_trace(nets: Any) -> None:
    net, on_device, x = nets
    wanted = net(x)
    for what in (on_device, on_device.forward):
        assert torch.equal(traced(what, x.to("xla"))(x), wanted)
    made = traced(func=on_device, example_kwarg_inputs={"x": x.to("xla")})
    assert torch.equal(made(x=x), wanted)
    assert {p.device.type for p in on_device.parameters()} == {"xla"}
    assert on_device.shift.device.type == "xla"
    file = io.BytesIO()
    torch.jit.save(made, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(x), wanted)
    # As its warning says.
    there = made.to("xla")(x.to("xla"))
    assert there.device.type == "xla"
    torch.testing.assert_close(there.cpu(), wanted, rtol=1e-5, atol=1e-5)
    there.sum().backward()
    assert all(p.grad is not None for p in made.parameters())


def test_trace_module(nets: Any) -> None:
    net, on_device, x = nets
    inputs = {"forward": x.to("xla"), "first_alone": x.to("xla")}
    with pytest.warns(UserWarning, match="a copy on the CPU"):
        made = torch.jit.trace_module(on_device, inputs)
    assert torch.equal(made(x), net(x))
    assert torch.equal(made.first_alone(x), net.first_alone(x))


def test_trace_of_a_function(nets: Any) -> None:
    _, on_device, x = nets
    assert torch.equal(traced(lambda a: F.softmax(a, -1), x.to("xla"))(x), x.softmax(-1))
    weight = on_device.first.weight
    for function in (lambda a: F.conv2d(a, weight), lambda a: on_device(a)):
        with pytest.raises(UnsupportedOpError, match="give the module itself"):
            traced(function, x.to("xla"))
    traced(on_device, x.to("xla"))  # nothing is left behind


def test_trace_on_the_cpu(nets: Any) -> None:
    """Is torch's, of the module itself, and says nothing."""
    net, _, x = nets
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made = torch.jit.trace(net, x)
    assert next(made.parameters()) is net.first.weight


def test_trace_of_a_sharded_module(nets: Any, mesh_2x4: DeviceMesh) -> None:
    _, on_device, x = nets
    xd.fully_shard(on_device, mesh=mesh_2x4["dp"])
    with pytest.raises(UnsupportedOpError, match=r"Conv2d\.weight is sharded.*full_state_dict"):
        torch.jit.trace(on_device, x.to("xla"))


def test_add_graph(nets: Any, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="no tensorboard")
    _, on_device, x = nets
    writer = tensorboard.SummaryWriter(tmp_path)
    with pytest.warns(UserWarning, match="a copy on the CPU"):
        writer.add_graph(on_device, x.to("xla"))
    writer.close()
    assert any(path.stat().st_size > 500 for path in tmp_path.iterdir())


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_onnx(nets: Any, tmp_path: Path, dynamo: bool) -> None:
    onnx = pytest.importorskip("onnx", reason="no onnx")
    pytest.importorskip("onnxscript", reason="no onnxscript")
    reference = pytest.importorskip("onnx.reference")
    net, on_device, x = nets
    file = str(tmp_path / "net.onnx")
    torch.onnx.export(on_device, (x.to("xla"),), file, dynamo=dynamo)
    graph = onnx.load(file)
    inputs = {graph.graph.input[0].name: x.numpy()}
    (found,) = reference.ReferenceEvaluator(graph).run(None, inputs)
    torch.testing.assert_close(torch.from_numpy(found), net(x), rtol=1e-4, atol=1e-4)
