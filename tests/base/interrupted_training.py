"""Trains a small model while Ctrl-C is pressed, or another signal comes whose handler raises, at
random times, and checks after each one that every tensor is as before or after the optimizer's
step. `test_interrupts.py` runs this file.

The same training without interrupts comes first. Then each attempt at a step is interrupted once,
by a thread; parameters and optimizer must be, bit by bit,
those of the undisturbed run before this step or after it, and the next attempt goes on from there.
Interrupts also come from outside with ``--outside``: the parent has to send one that many seconds
after each line ``press SECONDS``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "loop": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
}
WAIT_S = 20
# Ctrl-C, a limit of time, and a scheduler that wants the machine back.
SIGNALS = [signal.SIGINT, signal.SIGALRM, signal.SIGTERM]


class Training:
    """A model, its optimizer and one step, on a mesh or on the CPU."""

    def __init__(self, optimizer: str, mesh: Any, compiled: bool = False) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.LayerNorm(16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 4),
        )
        self.model = model
        self.mesh = mesh
        make_optimizer, options = OPTIMIZERS[optimizer]
        if mesh is not None:
            layouts = {2: [Replicate(), Shard(0)], 1: [Replicate(), Replicate()]}
            xd.distribute_module(
                model,
                mesh,
                lambda name, module, mesh: [
                    setattr(
                        module, key, torch.nn.Parameter(distribute_tensor(p, mesh, layouts[p.ndim]))
                    )
                    for key, p in list(module.named_parameters(recurse=False))
                ],
            )
        elif options.get("fused"):
            options = {**options, "fused": False}
        self.optimizer = make_optimizer(model.parameters(), **options)
        # The compiled step: the same checks apply, whatever part of the call is interrupted.
        self.step = xd.compile(self._step) if compiled else self._step

    def batch(self, number: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(number % 7)
        x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
        if self.mesh is None:
            return [x, y]
        return [distribute_tensor(t, self.mesh, [Shard(0), Replicate()]) for t in (x, y)]

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = ((self.model(x) - y) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[bytes]:
        """The parameters and all of the optimizer's state; every gradient is looked at, too."""
        tensors = list(self.model.parameters())
        found = []
        for p in tensors:
            if p.grad is not None:
                assert p.grad.cpu().isfinite().all()
            found.append(p.detach().cpu())
        for p in tensors:
            for key, value in sorted(self.optimizer.state.get(p, {}).items()):
                if value is None:
                    continue
                assert isinstance(value, torch.Tensor), key
                found.append(value.detach().cpu())
        return [t.numpy().tobytes() for t in found]


def interrupt_later(delay: float, how: str, signum: signal.Signals) -> None:
    """Send a signal in ``delay`` seconds."""

    def press() -> None:
        time.sleep(delay)
        if how == "process":
            os.kill(os.getpid(), signum)
        else:
            signal.pthread_kill(threading.main_thread().ident, signum)

    threading.Thread(target=press).start()


def forget_programs() -> None:
    """Let everything be traced and compiled again."""
    import jax

    from xla_dtensor.dispatch import execute
    from xla_dtensor.execution import batch

    execute._plans.clear()
    batch.executables.clear()
    jax.clear_caches()


def interrupted(
    training: Training, number: int, delay: float, how: str, signum: signal.Signals
) -> bool:
    """One attempt at step ``number``, interrupted once: whether the interrupt came in the step."""
    arguments = training.batch(number)
    in_step = True
    try:
        if how == "outside":
            print(f"press {delay}", flush=True)
        else:
            interrupt_later(delay, how, signum)
        training.step(*arguments)
        in_step = False
        for _ in range(100 * WAIT_S):
            time.sleep(0.01)
    except KeyboardInterrupt:
        return in_step
    raise AssertionError("an interrupt got lost")


def train(optimizer: str, args: argparse.Namespace, mesh: Any, rng: random.Random) -> None:
    """Train without and with interrupts, and compare."""
    undisturbed, plain = Training(optimizer, mesh, args.compiled), Training(optimizer, None)
    states, seconds = [undisturbed.state()], []
    for number in range(args.interrupts + 3):
        start = time.perf_counter()
        loss = undisturbed.step(*undisturbed.batch(number)).cpu()
        states.append(undisturbed.state())
        seconds.append(time.perf_counter() - start)
        torch.testing.assert_close(loss, plain.step(*plain.batch(number)))
    typical = sorted(seconds)[len(seconds) // 2]

    training = Training(optimizer, mesh, args.compiled)
    number, in_steps, not_taken = 0, 0, 0
    cold = set(rng.sample(range(args.interrupts), args.cold))
    for attempt in range(args.interrupts):
        delay = rng.uniform(0, 1.1 * typical)
        if attempt in cold:
            forget_programs()
            delay = rng.uniform(0, seconds[0])
        how = rng.choice(
            ["process", "thread", "outside"] if args.outside else ["process", "thread"]
        )
        in_step = interrupted(training, number, delay, how, rng.choice(SIGNALS))
        state = training.state()
        in_steps += in_step
        if state == states[number + 1]:
            number += 1
        elif state == states[number]:
            assert in_step, "a step that returned changed nothing"
            not_taken += 1
        else:
            raise AssertionError(f"half a step, in attempt {attempt} at step {number}")

    # And training goes on, with the losses of torch on the CPU.
    plain = Training(optimizer, None)
    for k in range(number):
        plain.step(*plain.batch(k))
    for k in range(number, number + 3):
        loss = training.step(*training.batch(k)).cpu()
        torch.testing.assert_close(loss, plain.step(*plain.batch(k)))
        assert training.state() == states[k + 1]
    print(
        f"{optimizer}: {args.interrupts} interrupts, {in_steps} in steps, {not_taken} steps not "
        "taken",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("optimizers", nargs="+", choices=OPTIMIZERS)
    parser.add_argument("--compiled", action="store_true", help="step = xd.compile(step)")
    parser.add_argument("--interrupts", type=int, default=10, help="per optimizer")
    parser.add_argument("--cold", type=int, default=0, help="of these, while programs compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outside", action="store_true", help="a third come from the parent")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for signum in SIGNALS:
        signal.signal(signum, signal.default_int_handler)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    for optimizer in args.optimizers:
        train(optimizer, args, mesh, rng)


if __name__ == "__main__":
    main()
