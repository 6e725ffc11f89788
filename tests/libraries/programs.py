"""A small program for each library, as its own first page has it, with the device changed.

Each is called with "cpu" or "xla" and gives numbers, which have to be the same. What libraries that
find the device themselves do is in the other files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Numbers = list[float]


@dataclass(frozen=True)
class Program:
    """One library's.

    Attributes:
        package: as it is imported.
        what: of it is run, for the table.
        line: that says the device.
        run: the program.
        tolerance: relative, of its numbers.
        distribution: what is installed, if it is called otherwise.
    """

    package: str
    what: str
    line: str
    run: Callable[[str], Numbers]
    tolerance: float = 1e-5
    distribution: str = ""


_TO = '`model.to("xla")`'


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 8, generator=generator), torch.arange(16) % 4


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _fit(device: str, make: Callable[[Any], Any], steps: int = 3) -> Numbers:
    """The losses of a plain loop with an optimizer of the library's."""
    model = _net().to(device)
    optimizer = make(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    x, y = (t.to(device) for t in _data())
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _torchmetrics(device: str) -> Numbers:
    import torchmetrics

    x, y = _data()
    metric = torchmetrics.MetricCollection(
        torchmetrics.Accuracy(task="multiclass", num_classes=4),
        torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"),
        torchmetrics.AUROC(task="multiclass", num_classes=4),
        torchmetrics.ConfusionMatrix(task="multiclass", num_classes=4),
    ).to(device)
    for part in (slice(0, 8), slice(8, 16)):
        metric.update(x[part, :4].softmax(-1).to(device), y[part].to(device))
    return [n for v in metric.compute().values() for n in v.flatten().tolist()]


def _schedulefree(device: str) -> Numbers:
    import schedulefree

    return _fit(device, lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=0.01))


def _lion(device: str) -> Numbers:
    from lion_pytorch import Lion

    return _fit(device, lambda parameters: Lion(parameters, lr=1e-3))


def _pytorch_optimizer(device: str) -> Numbers:
    import pytorch_optimizer

    return _fit(device, lambda parameters: pytorch_optimizer.AdaBelief(parameters, lr=1e-2))


def _torch_ema(device: str) -> Numbers:
    from torch_ema import ExponentialMovingAverage

    model = _net().to(device)
    average = ExponentialMovingAverage(model.parameters(), decay=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (t.to(device) for t in _data())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update()
    with average.average_parameters(), torch.no_grad():
        smooth = nn.functional.cross_entropy(model(x), y).item()
    return [smooth, nn.functional.cross_entropy(model(x), y).item()]


def _einops(device: str) -> Numbers:
    import einops
    from einops.layers.torch import Rearrange

    x = torch.arange(2 * 4 * 4 * 3.0).reshape(2, 4, 4, 3).to(device)
    patches = einops.rearrange(x, "b (h p) (w q) c -> b (h w) (p q c)", p=2, q=2)
    means = einops.reduce(patches, "b n c -> b c", "mean")
    weights = torch.linspace(0, 1, 12 * 5).reshape(12, 5).to(device)
    products = einops.einsum(means, weights, "b c, c d -> b d")
    return [
        *Rearrange("b d -> (d b)")(products).tolist(),
        *einops.pack([x, x], "* c")[0][7].tolist(),
    ]


def _x_transformers(device: str) -> Numbers:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True)
    made = TransformerWrapper(num_tokens=32, max_seq_len=12, attn_layers=layers)
    model = AutoregressiveWrapper(made).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = (torch.arange(24) * 7 % 32).reshape(2, 12).to(device)
    losses = []
    for _ in range(2):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _skorch(device: str) -> Numbers:
    from skorch import NeuralNetClassifier

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    torch.manual_seed(0)
    x, y = _data()
    net = NeuralNetClassifier(
        Net,
        criterion=nn.CrossEntropyLoss,
        max_epochs=2,
        lr=0.1,
        batch_size=8,
        device=device,
        train_split=None,
        verbose=0,
    )
    net.fit(x.numpy(), y.numpy())
    return [*net.history[:, "train_loss"], *net.predict_proba(x.numpy())[0].tolist()]


def _gpytorch(device: str) -> Numbers:
    import gpytorch

    x = torch.linspace(0, 1, 12).to(device)
    y = torch.sin(x * 6)

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
    model = Model(likelihood).to(device)
    model.train()
    likelihood.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = -objective(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _zuko(device: str) -> Numbers:
    import zuko

    torch.manual_seed(0)
    flow = zuko.flows.NSF(features=3, context=0, transforms=2, hidden_features=(16,)).to(device)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    x = _data()[0][:, :3].to(device)
    losses = []
    for _ in range(2):
        loss = -flow().log_prob(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _captum(device: str) -> Numbers:
    from captum.attr import IntegratedGradients, Saliency

    model = _net().to(device)
    x = _data()[0][:2].to(device)
    found = IntegratedGradients(model).attribute(x, target=1, n_steps=8)
    slopes = Saliency(model).attribute(x.clone().requires_grad_(), target=1)
    return [*found.flatten().tolist(), *slopes.flatten().tolist()]


def _torchdiffeq(device: str) -> Numbers:
    from torchdiffeq import odeint

    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.to(device)
    times = torch.linspace(0, 1, 4).to(device)
    start = torch.ones(3, 2).to(device)
    loss = odeint(lambda t, y: model(y), start, times, method="rk4").square().mean()
    loss.backward()
    return [loss.item(), *model[0].weight.grad.flatten().tolist()]


def _torch_geometric(device: str) -> Numbers:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
    graphs = [Data(x=torch.randn(4, 6), edge_index=edges) for _ in range(3)]
    batch: Any = Batch.from_data_list(graphs).to(device)
    first, second, last = GCNConv(6, 8).to(device), GATConv(8, 8).to(device), nn.Linear(8, 2)
    last.to(device)
    hidden = torch.relu(first(batch.x, batch.edge_index))
    hidden = torch.relu(second(hidden, batch.edge_index))
    out = last(global_mean_pool(hidden, batch.batch))
    loss = nn.functional.cross_entropy(out, torch.tensor([0, 1, 0]).to(device))
    loss.backward()
    return [loss.item(), *out.flatten().tolist(), first.lin.weight.grad.norm().item()]


def _datasets(device: str) -> Numbers:
    from datasets import Dataset

    rows = Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]})
    loader = torch.utils.data.DataLoader(rows.with_format("torch", device=device), batch_size=2)
    (batch,) = loader
    assert batch["x"].device.type == device
    return [*batch["x"].flatten().tolist(), *map(float, batch["y"].tolist())]


PROGRAMS = (
    Program("torchmetrics", "a collection of four metrics", '`metric.to("xla")`', _torchmetrics),
    Program(
        "datasets", "batches on the device", '`rows.with_format("torch", device="xla")`', _datasets
    ),
    Program(
        "skorch", "`fit`, `predict_proba`", '`NeuralNetClassifier(..., device="xla")`', _skorch
    ),
    Program("einops", "functions and layers", "none: it takes what it is given", _einops),
    Program("torch_ema", "an average of a training's weights", _TO, _torch_ema),
    Program("schedulefree", "AdamW in a loop", _TO, _schedulefree),
    Program("lion_pytorch", "Lion in a loop", _TO, _lion),
    Program("pytorch_optimizer", "AdaBelief in a loop", _TO, _pytorch_optimizer, 1e-4),
    Program("x_transformers", "a decoder's training", _TO, _x_transformers),
    Program(
        "torch_geometric",
        "GCN, GAT, pooling, a batch of graphs",
        '`batch.to("xla")`',
        _torch_geometric,
    ),
    Program("gpytorch", "an exact GP's training", _TO, _gpytorch, 1e-3),
    Program("zuko", "a neural spline flow's training", '`flow.to("xla")`', _zuko, 1e-4),
    Program("captum", "integrated gradients, saliency", _TO, _captum, 1e-4),
    Program("torchdiffeq", "rk4 and its gradient", _TO, _torchdiffeq),
)


def installed(program: Program) -> bool:
    """Whether its library is there."""
    with contextlib.suppress(ImportError):
        __import__(program.package)
        return True
    return False
