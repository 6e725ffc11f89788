"""How much of torch is right in JAX programs: xd.jax beside torchax, in processes of their own.

    python benchmarks/jax_counts.py op_db architectures                          # xd.jax
    python benchmarks/jax_counts.py op_db architectures --torchax PATH/python    # and torchax

``op_db`` are the entries of torch's own tests: the first sample of each, values and gradients under
``jax.jit``. ``architectures`` are transformers' models (`tests/transformers/architectures.py`):
the loss and its gradients by all parameters. Both are in float32 with JAX's 64-bit types off, and
compared with CPU torch; float64 tells how far that is off itself.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from checkouts import ROOT

SECONDS = 60  # that one of them may take
TOLERANCE = 1e-4  # of the largest element, beside ten times what CPU torch is off
Function = Callable[..., Any]


def of_xd(function: Function) -> Function:
    """A torch function as one of arrays."""
    import xla_dtensor as xd

    return lambda *arrays: xd.jax.call(function, *arrays)


def of_torchax(function: Function) -> Function:
    """The same by torchax."""
    from jax_programs import imported_torchax

    torchax = imported_torchax()
    return lambda *arrays: torchax.interop.call_torch(function, *arrays)


def module_of_torchax(module: Any) -> tuple[Any, Function]:
    """Parameters and a function of them and of what the module is called with by name."""
    from jax_programs import imported_torchax

    params, apply = imported_torchax().extract_jax(module)
    return params, lambda params, batch: apply(params, (), batch)["loss"]


def module_of_xd(module: Any) -> tuple[Any, Function]:
    """The same by xd.jax."""
    import jax

    import xla_dtensor as xd

    params, apply = xd.jax.from_module(module)
    return params, lambda params, batch: apply(params, **batch, rng=jax.random.key(0))["loss"]


OF_FUNCTIONS = {"xd": of_xd, "torchax": of_torchax}
DEVICES = {"xd": "xla", "torchax": "jax"}  # for what makes tensors
OF_MODULES = {"xd": module_of_xd, "torchax": module_of_torchax}


def far(found: Sequence[Any], wanted: Sequence[Any], exact: Sequence[Any]) -> float:
    """How far arrays are from what they should be, at most, as a part of what they may be."""
    import numpy as np

    worst = 0.0
    for mine, right, best in zip(found, wanted, exact, strict=True):
        mine, right, best = (np.asarray(x) for x in (mine, right, best))
        if mine.shape != right.shape:
            return float("inf")
        if not np.issubdtype(right.dtype, np.inexact):
            worst = max(worst, 0.0 if np.array_equal(mine, right) else float("inf"))
            continue
        if not right.size:
            continue
        odd = ~np.isfinite(right)
        if not np.array_equal(mine[odd], right[odd], equal_nan=True):
            return float("inf")
        mine, right, best = (np.where(odd, 0, x) for x in (mine, right, best))
        scale = max(np.abs(right).max(), 1e-6)
        allowed = (
            TOLERANCE * scale + 10 * np.abs(right - np.where(np.isfinite(best), best, 0)).max()
        )
        distance = float(np.abs(mine - right).max() / allowed)
        worst = max(worst, distance if distance == distance else float("inf"))
    return worst


def of_entry(entry: Any, which: str) -> str:
    """What comes of an entry of ``op_db``: "right", "wrong", or why it can't be compared.

    Raises:
        Exception: whatever the side raises.
    """
    import jax
    import jax.numpy as jnp
    import torch
    from torch.utils import _pytree as pytree

    from tests.conformance.entries import RANDOM, UNDEFINED, differentiable, full_name, samples

    if RANDOM.fullmatch(full_name(entry)) or UNDEFINED.fullmatch(full_name(entry)):
        return "random"
    dtypes = sorted(entry.supported_dtypes("cpu"), key=str)
    dtype = torch.float32 if torch.float32 in dtypes else None
    found = samples(entry, dtype or dtypes[0], 1) if dtypes else []
    if not found:
        return "no sample"
    sample = found[0]
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors: Any, device: str = "cpu") -> Any:
        given = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            given[i] = tensor
        value, args, kwargs = pytree.tree_unflatten(given, spec)
        if "device" in kwargs:
            kwargs = kwargs | {"device": device}
        out = sample.output_process_fn_grad(entry.op(value, *args, **kwargs))
        return tuple(x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor))

    tensors = [leaves[i].detach() for i in at]
    by = [n for n, i in enumerate(at) if leaves[i].requires_grad and not leaves[i].is_complex()]
    wants_gradients = dtype is not None and differentiable(entry, dtype) and by

    def on_cpu(tensors: list[Any]) -> tuple[list[Any], list[Any]]:
        given = [
            t.clone().requires_grad_(bool(wants_gradients) and i in by)
            for i, t in enumerate(tensors)
        ]
        out = function(*given)
        if not wants_gradients:
            return [x.detach().numpy() for x in out], []
        through = [x for x in out if x.requires_grad]
        grads = torch.autograd.grad(
            [(x * x.detach().abs().add(1)).sum().real for x in through],
            [given[i] for i in by],
            allow_unused=True,
        )
        empty = zip(grads, by, strict=True)
        gradients = [torch.zeros_like(given[i]) if g is None else g for g, i in empty]
        return [x.detach().numpy() for x in out], [g.numpy() for g in gradients]

    try:
        right = on_cpu(tensors)
    except Exception as error:
        return f"no reference: {type(error).__name__}"
    exact = right
    with contextlib.suppress(Exception):  # not all take float64
        wide = on_cpu([t.double() if t.is_floating_point() else t for t in tensors])
        if [x.shape for x in wide[0]] == [x.shape for x in right[0]]:
            exact = wide
    wanted, gradients = right

    run = OF_FUNCTIONS[which](functools.partial(function, device=DEVICES[which]))
    arrays = [jnp.asarray(t.numpy()) for t in tensors]
    narrow = lambda xs: [x.astype(str(jnp.asarray(x).dtype)) for x in xs]
    if not wants_gradients:
        values = jax.jit(run)(*arrays)
        return "right" if far(jax.tree.leaves(values), narrow(wanted), exact[0]) <= 1 else "wrong"
    differentiated = [jnp.issubdtype(x.dtype, jnp.inexact) for x in narrow(wanted)]

    def loss(*arrays: Any) -> Any:
        out = jax.tree.leaves(run(*arrays))
        weighed = (
            (x * (1 + jnp.abs(jax.lax.stop_gradient(x)))).sum().real
            for x, counts in zip(out, differentiated, strict=True)
            if counts
        )
        return sum(weighed), out

    both = jax.value_and_grad(loss, argnums=by, has_aux=True)
    (_, values), got = jax.jit(both)(*arrays)
    distance = max(far(values, narrow(wanted), exact[0]), far(got, gradients, exact[1]))
    return "right" if distance <= 1 else "wrong"


def of_architecture(architecture: Any, which: str) -> str:
    """What comes of one of transformers' models."""
    import jax
    import jax.numpy as jnp
    import torch

    model, batch = architecture.make(), architecture.batch()
    model(**batch).loss.backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    value = model(**batch).loss.item()
    params, loss = OF_MODULES[which](model)
    arrays = {name: jnp.asarray(x.numpy()) for name, x in batch.items()}
    found, gradients = jax.jit(jax.value_and_grad(loss, allow_int=True))(params, arrays)
    largest = max(g.abs().max().item() for g in wanted.values())
    wrong = not abs(float(found) - value) < 1e-5
    for name, right in wanted.items():
        mine = torch.tensor(jax.device_get(gradients[name]))
        scale = max(right.abs().max().item(), 1e-3 * largest)
        wrong |= not (mine - right).abs().max() < TOLERANCE * scale
    return "wrong" if wrong else "right"


def subjects(kind: str) -> dict[str, Callable[[str], str]]:
    """By name what is counted, each as a function of the side."""
    if kind == "op_db":
        from tests.conformance.entries import full_name, op_db

        return {full_name(e): functools.partial(of_entry, e) for e in op_db()}
    from tests.transformers.architectures import ALL

    return {a.name: functools.partial(of_architecture, a) for a in ALL}


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise after `SECONDS`."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def measure(kind: str, which: str, known: frozenset[str]) -> None:
    """Print a line of JSON for each that isn't known yet, before and after it is tried."""
    warnings.simplefilter("ignore")
    for name, count in subjects(kind).items():
        if name in known:
            continue
        row = {"kind": kind, "which": which, "name": name}
        print(json.dumps(row | {"found": "ends the process"}), flush=True)
        try:
            with limited():
                found = count(which)
        except Exception as error:  # that one of the two can't do it is a result
            found = f"refused: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(json.dumps(row | {"found": found}), flush=True)


def counted(kind: str, which: str, python: str, kept: Path) -> dict[str, str]:
    """What was found, by name; in processes that go on where one has ended."""
    own = {"JAX_PLATFORMS": "cpu", "XLA_DTENSOR_CACHE": "off", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [python, __file__, kind, "--measure", which, "--json", str(kept)]
    while True:
        before = len(read(kept))
        with kept.open("a") as file:
            rc = subprocess.run(command, env={**os.environ, **own}, stdout=file).returncode
        if rc == 0 or len(read(kept)) == before:
            return {n: f for (k, w, n), f in read(kept).items() if (k, w) == (kind, which)}


def read(kept: Path) -> dict[tuple[str, str, str], str]:
    """The last line of each counts."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return {(row["kind"], row["which"], row["name"]): row["found"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("kinds", nargs="+", choices=("op_db", "architectures"))
    parser.add_argument("--torchax", help="the python of an environment that has torchax")
    parser.add_argument("--json", type=Path, default=Path(".cache/jax_counts.json"))
    parser.add_argument("--measure", choices=("xd", "torchax"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        (kind,) = options.kinds
        known = (n for k, w, n in read(options.json) if (k, w) == (kind, options.measure))
        measure(kind, options.measure, frozenset(known))
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    print("| | | right | wrong | refused | ends the process | not compared |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for kind in options.kinds:
        for which, python in (("xd", sys.executable), ("torchax", options.torchax)):
            if python is None:
                continue
            found = counted(kind, which, python, options.json)
            counts = Counter(f.split(":")[0] for f in found.values())
            named = ("right", "wrong", "refused", "ends the process")
            others = sum(counts.values()) - sum(counts[name] for name in named)
            print(
                f"| {kind} | {which} |", " | ".join(f"{counts[n]}" for n in named), f"| {others} |"
            )


if __name__ == "__main__":
    main()
