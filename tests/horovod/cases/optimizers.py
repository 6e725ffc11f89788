"""DistributedOptimizer, and giving all ranks one's state."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import xla_dtensor.horovod as hvd
from tests.horovod.ranks import (
    ALL,
    APART,
    alone,
    case,
    check,
    data,
    given,
    raises,
    same,
    sets,
)

DIMS = (6, 5, 3)


def network(seed=3):
    """On the host in processes and threads, as Horovod's users have it; else on the devices."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(DIMS[0], DIMS[1]), nn.Tanh(), nn.Linear(DIMS[1], DIMS[2]))
    return model.to("xla") if alone() else model


def loss_of(model, x):
    return model(x).square().mean()


class Reference:
    """What all ranks together compute, by CPU torch in one process: the average of the gradients of
    each rank's batch, and one step."""

    def __init__(self, make, ranks=None, seed=3):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(DIMS[0], DIMS[1]), nn.Tanh(), nn.Linear(DIMS[1], DIMS[2])
        )
        self.optimizer = make(self.model.parameters())
        self.ranks = list(range(hvd.size())) if ranks is None else ranks

    def gradients(self, seeds, factor=None):
        self.optimizer.zero_grad()
        for rank in self.ranks:
            for seed in seeds:
                x = data(rank, [4, DIMS[0]], seed=seed)
                loss = loss_of(self.model, x) * (factor or 1 / len(self.ranks))
                loss.backward()

    def step(self, seeds, clip=None, factor=None):
        self.gradients(seeds, factor)
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()

    def compare(self, model, ranks=None):
        for own, expected in zip(model.parameters(), self.model.parameters(), strict=True):
            check(own, same(expected.detach()), ranks=ranks, rtol=1e-4, atol=1e-6)


def batch(seed):
    return given([4, DIMS[0]], seed=seed)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def trained(make=sgd, steps=3, passes=1, clip=None, factor=None, **options):
    """Some steps, compared with the reference."""
    model, reference = network(), Reference(make)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    for step in range(steps):
        seeds = [step * passes + i for i in range(passes)]
        optimizer.zero_grad()
        for seed in seeds:
            loss_of(model, batch(seed)).backward()
        if clip is None:
            optimizer.step()
        else:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        reference.step(seeds, clip, factor)
    reference.compare(model)
    return model, optimizer


@case("X")
def gradients_are_averaged():
    model, optimizer = trained()
    assert isinstance(optimizer, torch.optim.SGD)
    if alone():
        assert all(p.varying == () for p in model.parameters())


@case("X")
def of_several_kinds():
    trained(adam)
    trained(op=hvd.Sum, factor=1.0)
    trained(gradient_predivide_factor=2.0)
    trained(passes=3)
    trained(compression=hvd.Compression.none)


@case("X")
def in_groups():
    trained(groups=2)
    model = network()
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        sgd(parameters), model.named_parameters(), groups=[parameters[:3]]
    )
    reference = Reference(sgd)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        reference.step([step])
    reference.compare(model)
    bad = [
        (-1, "non-negative integer"),
        ([["no"]], "torch.Tensor"),
        ([parameters[:1], parameters[:2]], "only appear once"),
    ]
    for groups, text in bad:
        raises(
            ValueError,
            lambda g=groups: hvd.DistributedOptimizer(sgd(model.parameters()), groups=g),
            text,
        )


@case("D")
def gradient_clipping():
    trained(clip=0.05)


@case("D")
def synchronize_step_warning():
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    loss_of(model, batch(0)).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.step()
    told = [w for w in found if "without optimizer.skip_synchronize()" in str(w.message)]
    assert len(told) == 1


@case("D", fast=True)
def duplicate_names():
    model = network()
    (weight, *_) = model.parameters()
    raises(
        ValueError,
        lambda: hvd.DistributedOptimizer(
            sgd([weight]), named_parameters=[("it", weight), ("it", weight)]
        ),
        "must be unique",
        "it",
    )
    raises(
        ValueError,
        lambda: hvd.DistributedOptimizer(sgd([weight]), named_parameters=[weight]),
        "tuples",
    )


@case("D")
def missing_named_parameters():
    model = network()
    some = list(model.named_parameters())[:1]
    raises(
        ValueError,
        lambda: hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=some),
        "not named",
    )


@case("D")
def no_named_parameters():
    without_names()


@case("D")
def optimizer_no_named_parameters():
    """Of several groups."""
    model = network()
    groups = [{"params": list(m.parameters())} for m in (model[0], model[2])]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    assert len(optimizer.param_groups) == 2
    names = list(optimizer.names.values())
    assert len(set(names)) == len(names) == 4


def without_names():
    model, reference = network(), Reference(sgd)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        reference.step([step])
    reference.compare(model)


@case("X", fast=True)
def errors_of_the_optimizer():
    model = network()
    parameters = list(model.parameters())
    make = hvd.DistributedOptimizer
    raises(
        ValueError,
        lambda: make(sgd(parameters), gradient_predivide_factor=2.0, op=hvd.Sum),
        "gradient_predivide_factor",
    )
    raises(ValueError, lambda: make(sgd(parameters), backward_passes_per_step=0), "> 0")
    optimizer = make(sgd(parameters))
    loss_of(model, batch(0)).backward()
    raises(AssertionError, optimizer.zero_grad, "race condition")
    raises(AssertionError, lambda: loss_of(model, batch(0)).backward(), "more than")
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        loss_of(model, batch(0)).backward()
    optimizer.step()


@case("D")
def dynamic_requires_grad():
    """Parameters take turns in being trained."""
    model = network()
    layers = [model[0], model[2]]
    expected = copy.deepcopy(Reference(sgd).model)
    plain = sgd(expected.parameters())
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for step in range(4):
        frozen = step % 2
        for i, (layer, other) in enumerate(zip(layers, [expected[0], expected[2]], strict=True)):
            for p in (*layer.parameters(), *other.parameters()):
                p.requires_grad_(i != frozen)
        optimizer.zero_grad(set_to_none=False)
        plain.zero_grad(set_to_none=False)
        loss_of(model, batch(step)).backward()
        optimizer.step()
        for rank in range(hvd.size()):
            (loss_of(expected, data(rank, [4, DIMS[0]], seed=step)) / hvd.size()).backward()
        if not alone() and step == 0:
            for p in expected[0].parameters():  # takes part with zeros
                p.grad = torch.zeros_like(p)
        plain.step()
    for own, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        check(own, same(wanted.detach()), rtol=1e-4, atol=1e-6)


@case("D", APART, fast=True)
def force_allreduce():
    """Some ranks use one branch of the model, some the other: all reduce all gradients."""
    torch.manual_seed(3)
    branches = nn.ModuleList([nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)])
    start = [b.weight.detach().clone() for b in branches]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(branches.parameters(), lr=1.0), branches.named_parameters()
    )
    rank, size = hvd.rank(), hvd.size()
    branches[rank % 2](torch.ones(1, 4) * (rank + 1)).sum().backward()
    optimizer.step()
    for i in (0, 1):
        total = sum(r + 1 for r in range(size) if r % 2 == i)
        expected = start[i] - torch.full((2, 4), total / size)
        torch.testing.assert_close(branches[i].weight.detach(), expected)


@case("P")
def optimizer_process_sets():
    if alone():
        pair = sets()
        model = network()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), process_set=pair.even
        )
        loss_of(model, batch(0)).backward()
        optimizer.step()
        reference = Reference(sgd, pair.even.ranks)
        reference.step([0])
        reference.compare(model, ranks=pair.even.ranks)
        for rank in pair.odd.ranks:
            lonely = Reference(sgd, [rank])
            lonely.step([0])
            lonely.compare(model, ranks=[rank])
        pair.remove()
        return
    pair = sets()
    model = network()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), process_set=pair.even
    )
    loss_of(model, batch(0)).backward()
    optimizer.step()
    ranks = pair.even.ranks if pair.even.included() else [hvd.rank()]
    reference = Reference(sgd, ranks)
    reference.step([0])
    reference.compare(model)
    raises(
        NotImplementedError,
        lambda: hvd.DistributedOptimizer(
            sgd(model.parameters()), op=hvd.Adasum, process_set=pair.even
        ),
        "Adasum",
    )
    pair.remove()


# --- giving all ranks one's state ----------------------------------------------------------------

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "lr": 0.1},
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "Adagrad": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adamax": {},
    "NAdam": {},
    "Rprop": {},
    "Adadelta": {},
    "ASGD": {},
}


def differs_by_rank(model):
    """Let each rank's parameters be its own."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + hvd.rank() * 0.5)


@case("D")
def broadcast_state():
    for name in list(OPTIMIZERS)[: 3 if alone() else None]:
        state_of(name)


def state_of(name):
    root = 1
    model = network()
    differs_by_rank(model)
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    loss_of(model, batch(0)).backward()
    optimizer.step()
    reference = Reference(lambda p: getattr(torch.optim, name)(p, **OPTIMIZERS[name]))
    with torch.no_grad():
        for p in reference.model.parameters():
            p.mul_(1 + root * 0.5)
    loss_of(reference.model, data(root, [4, DIMS[0]])).backward()
    reference.optimizer.step()

    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    reference.compare(model)
    for own, wanted in zip(
        optimizer.state.values(), reference.optimizer.state.values(), strict=True
    ):
        assert own.keys() == wanted.keys()
        for key, value in wanted.items():
            if isinstance(value, torch.Tensor):
                check(own[key], same(value), rtol=1e-4, atol=1e-6)
            else:
                assert own[key] == value


@case("D", APART)
def broadcast_state_of_a_new_optimizer():
    """The others have no state yet, and other options."""
    rank = hvd.rank()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), betas=(0.8, 0.9))
    if rank == 0:
        loss_of(model, batch(0)).backward()
        optimizer.step()
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert len(optimizer.state) == 4 and optimizer.param_groups[0]["lr"] == 0.1
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {1.0}


@case("D", fast=True)
def broadcast_state_options():
    model = network()
    options = hvd.per_rank(lambda r: {"lr": 0.2 * (r + 1), "momentum": 0.6, "nesterov": r == 0})
    mine = options[0] if alone() else options
    groups = [
        {"params": list(model[0].parameters()), **mine},
        {"params": list(model[2].parameters()), "lr": mine["lr"] * 2},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.001, momentum=0.9)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    first, second = optimizer.param_groups
    assert (first["lr"], first["momentum"], first["nesterov"]) == (0.2, 0.6, True)
    assert (second["lr"], second["momentum"], second["nesterov"]) == (0.4, 0.9, False)
    assert isinstance(first["nesterov"], bool) and isinstance(first["lr"], float)
    lbfgs = torch.optim.LBFGS(model.parameters())
    raises(ValueError, lambda: hvd.broadcast_optimizer_state(lbfgs, 0), "LBFGS")


@case("D")
def broadcast_state_no_grad():
    """Of parameters of which some are frozen."""
    model = network()
    model[0].requires_grad_(False)
    differs_by_rank(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    reference = Reference(sgd)
    reference.compare(model)
    optimizer = sgd(p for p in model.parameters() if p.requires_grad)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    parameters = list(model.parameters())
    raises(ValueError, lambda: hvd.broadcast_parameters(parameters, 0), "state_dict")


@case("G", ALL)
def broadcast_state_gpu():
    """Of a model on the devices, also where ranks are processes and threads."""
    model = network().to("xla")
    differs_by_rank(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    torch.manual_seed(3)
    reference = Reference(sgd)
    with torch.no_grad():
        for p in reference.model.parameters():
            p.mul_(1.5)
    reference.compare(model)


@case("G", APART)
def model_parallelism():
    """One layer on the host, one on the device."""
    model, reference = network(), Reference(sgd)
    model[2].to("xla")
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        hidden = model[1](model[0](batch(step)))
        model[2](hidden.to("xla")).square().mean().backward()
        optimizer.step()
        reference.step([step])
    reference.compare(model)


@case("G")
def horovod_sync_batch_norm():
    size = hvd.size()
    for shape in ([4, 3], [4, 3, 5], [2, 3, 4, 4]):
        every = torch.cat([data(r, shape, seed=len(shape)) for r in range(size)]).requires_grad_()
        plain = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3)
        norm = hvd.SyncBatchNorm(3)
        norm = norm.to("xla") if alone() else norm
        x = given(shape, seed=len(shape), grad=True)
        weights = data(0, [size * shape[0], *shape[1:]], seed=50)
        own = hvd.per_rank(lambda r, w=weights, n=shape[0]: w[n * r : n * (r + 1)])
        got, wanted = norm(x), plain(every)
        (got * own).sum().backward()
        (wanted * weights).sum().backward()
        rows = shape[0]
        close = {"rtol": 1e-3, "atol": 1e-5}
        check(got, lambda r, w=wanted, n=rows: w.detach()[n * r : n * (r + 1)], **close)
        check(x.grad, lambda r, e=every, n=rows: e.grad[n * r : n * (r + 1)], **close)
        check(norm.running_mean, same(plain.running_mean), **close)
        check(norm.running_var, same(plain.running_var), **close)
        total = hvd.allreduce(norm.weight.grad, op=hvd.Sum)
        check(total, same(plain.weight.grad), **close)
        norm.eval(), plain.eval()
        wanted = plain(every.detach()).split(rows)
        check(norm(x.detach()), lambda r, w=wanted: w[r], **close)
    raises(ValueError, lambda: hvd.SyncBatchNorm(3)(torch.ones(3)), "2D")


@case("X", APART)
def sync_batch_norm_of_unequal_batches():
    rows = [2 + r for r in range(hvd.size())]
    parts = [data(r, [n, 3]) for r, n in enumerate(rows)]
    plain, norm = nn.BatchNorm1d(3), hvd.SyncBatchNorm(3)
    wanted = plain(torch.cat(parts)).split(rows)[hvd.rank()]
    torch.testing.assert_close(norm(parts[hvd.rank()]), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var, plain.running_var)


@case("G", ALL)
def horovod_allreduce_multi_gpu():
    """Of tensors on the device, several of them."""
    tensors = [given([3], seed=s).to("xla") for s in range(3)]
    for seed, tensor in enumerate(tensors):
        got = hvd.allreduce(tensor, op=hvd.Sum)
        assert got.device.type == "xla"
        whole = sum(data(r, [3], seed=seed) for r in range(hvd.size()))
        check(got, same(whole))


@case("X", fast=True)
def a_loss_of_torchs_functional():
    """cross_entropy, as scripts have it."""
    model = network()
    optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters())
    labels = hvd.per_rank(lambda r: torch.tensor([0, 1, 2, r % 3]))
    F.cross_entropy(model(batch(0)), labels).backward()
    optimizer.step()
    reference = Reference(adam)
    for rank in range(hvd.size()):
        target = torch.tensor([0, 1, 2, rank % 3])
        loss = F.cross_entropy(reference.model(data(rank, [4, DIMS[0]])), target)
        (loss / hvd.size()).backward()
    reference.optimizer.step()
    reference.compare(model)
