"""Handwriting-like digits with Horovod's API: the same script in each of its modes.

    python examples/horovod_mnist.py                              # one process, a rank per device
    python examples/horovod_mnist.py --np 4                       # threads, a rank each
    torchrun --nproc-per-node 4 examples/horovod_mnist.py         # processes, a rank each

The digits are those of the fonts that ship with matplotlib, moved about and with noise. The
structure is that of Horovod's own examples: a sampler per rank, a learning rate that grows with the
number of ranks and is warmed up, rank 0's parameters for all, metrics averaged, and one rank that
prints and saves. What depends on the rank is made by `hvd.per_rank`, and who prints is
`hvd.is_coordinator()`, so it doesn't matter whether ranks are devices, threads or processes.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

# With fewer threads, XLA's simulated CPU devices can deadlock waiting for one another.
os.environ.setdefault("NPROC", "64")

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.ft2font import FT2Font
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

import xla_dtensor as xd
import xla_dtensor.horovod as hvd

FONTS = ("DejaVuSans*", "DejaVuSerif*", "STIXGeneral*", "cmr10", "cmb10", "cmtt10", "cmss10")


def glyphs() -> list[tuple[np.ndarray, int]]:
    """Every digit in every font, as an image between 0 and 1."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    paths = sorted({path for name in FONTS for path in folder.glob(f"{name}.ttf")})
    paths = [path for path in paths if "Display" not in path.name]  # these have no digits
    found = []
    for path in paths:
        font = FT2Font(str(path))
        font.set_size(18, 72)
        for digit in range(10):
            font.set_text(str(digit))
            font.draw_glyphs_to_bitmap()
            found.append((np.asarray(font.get_image(), np.float32) / 255, digit))
    return found


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of shape [count, 1, 20, 20] and their digits."""
    rng = np.random.default_rng(seed)
    known = glyphs()
    images, labels = np.zeros((count, 1, 20, 20), np.float32), np.zeros(count, np.int64)
    for i in range(count):
        glyph, labels[i] = known[rng.integers(len(known))]
        rows, columns = (min(n, 20) for n in glyph.shape)
        top = min(max((20 - rows) // 2 + rng.integers(-2, 3), 0), 20 - rows)
        left = min(max((20 - columns) // 2 + rng.integers(-2, 3), 0), 20 - columns)
        images[i, 0, top : top + rows, left : left + columns] = glyph[:rows, :columns]
    images += rng.normal(0, 0.1, images.shape).astype(np.float32)
    return torch.from_numpy(images), torch.from_numpy(labels)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(args: argparse.Namespace) -> float:
    """The accuracy on digits that it hasn't seen."""
    hvd.init()
    torch.manual_seed(42)
    images, labels = digits(args.images, seed=0)
    test_images, test_labels = digits(args.images // 4, seed=1)

    @functools.cache
    def order(rank: int, epoch: int) -> list[int]:
        """The rows of a rank in an epoch."""
        sampler = DistributedSampler(images, num_replicas=hvd.size(), rank=rank, seed=args.seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    model = network().to("xla")
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if args.compile:
        step = xd.compile(step)
    steps = len(order(0, 0)) // args.batch
    for epoch in range(args.epochs):
        for i in range(steps):
            # Each rank's learning rate grows to that of all ranks together in the first epoch.
            done = min((epoch * steps + i + 1) / steps, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * (1 + done * (hvd.size() ** 0.5 - 1))
            rows = slice(i * args.batch, (i + 1) * args.batch)
            x = hvd.per_rank(lambda r, e=epoch, s=rows: images[order(r, e)[s]], device="xla")
            y = hvd.per_rank(lambda r, e=epoch, s=rows: labels[order(r, e)[s]], device="xla")
            loss = step(x, y)
        loss = hvd.allreduce(loss, name="loss").item()
        if hvd.is_coordinator():
            print(f"epoch {epoch + 1}: loss {loss:.3f} on {hvd.size()} ranks", flush=True)

    share = len(test_labels) // hvd.size()
    with torch.no_grad():
        x = hvd.per_rank(lambda r: test_images[r * share : (r + 1) * share], device="xla")
        y = hvd.per_rank(lambda r: test_labels[r * share : (r + 1) * share], device="xla")
        right = (model(x).argmax(1) == y).float().mean()
        accuracy = hvd.allreduce(right, name="accuracy").item()
    if hvd.is_coordinator():
        print(f"accuracy {accuracy:.3f}", flush=True)
        if args.save:
            torch.save({name: p.cpu() for name, p in model.state_dict().items()}, args.save)
    hvd.shutdown()
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--np", type=int, help="this many threads as ranks (hvd.run)")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32, help="of each rank")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="where to write the parameters")
    parser.add_argument("--compile", action="store_true", help="the step as one program; not --np")
    args = parser.parse_args()
    if args.np:
        hvd.run(train, args=(args,), np=args.np)
    else:
        train(args)


if __name__ == "__main__":
    main()
