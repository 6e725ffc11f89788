"""A program as a script that needs nothing of the tests: it prints expected and got."""

from __future__ import annotations

import inspect

from tests.conftest import MESHES
from tests.fuzz.functions import FUNCTIONS
from tests.fuzz.program import Leaf, Program
from tests.fuzz.run import SEED, Failure

HEAD = '''"""{title}"""

import os

os.environ["XLA_DTENSOR_EAGER"] = "{mode}"
os.environ.setdefault("NPROC", "64")

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
'''
LAZY = """from xla_dtensor.execution import lazy, pieces

lazy.OFTEN = pieces.OFTEN = 0  # a few operations, too, are joined at once
"""
MESH = """
on_devices = xd.init_device_mesh("xla", {shape}, mesh_dim_names={names})
mesh = {shape}  # of CPU torch
"""
DRAWS = """

class DRAWS:
    record = None
    noted = staticmethod(lambda value: value)

"""
INSIDE = """

def with_backward(*leaves):
    loss, outputs = program(*leaves)
    loss.backward()
    return loss.detach(), [t.detach() for t in outputs]

"""
RUN = """

def show(title, function, leaves):
    torch.manual_seed({seed})
    loss, outputs = function(*leaves)
{backward}    print(title)
    for name, value in zip({outputs}, outputs):
        print("  ", name, value.detach().cpu().tolist())
    for name, leaf in zip({names}, leaves):
        print("   afterwards", name, leaf.detach().cpu().tolist())
        if leaf.grad is not None:
            print("   gradient of", name, leaf.grad.cpu().tolist())


def on_mesh(layouts):
    return [
        distribute_tensor(v, on_devices, p).requires_grad_(g)
        for v, p, g in zip(values, layouts, needs_grad)
    ]


values = [
{values}
]
layouts = [
{layouts}
]
needs_grad = {grads}
"""
EXPECTED = """leaves = [v.clone().requires_grad_(g) for v, g in zip(values, needs_grad)]
show("expected, by CPU torch:", {function}, leaves)
mesh = on_devices
"""
# CPU torch draws other numbers.
EXPECTED_OF_DRAWS = """mesh = on_devices
show("expected, replicated:", {function}, on_mesh([[Replicate()] * mesh.ndim for _ in values]))
"""
GOT = """show("got, {way}:", {function}, on_mesh(layouts))
"""


def script(program: Program, failure: Failure, seed: int) -> str:
    """The text of the script."""
    shape = program.mesh_shape
    known = MESHES.get(program.mesh)
    names = known[1] if known else tuple(f"d{i}" for i in range(len(shape)))
    inside = bool(failure.way == "compiled" and program.loss)
    function = "with_backward" if inside else "program"
    is_compiled = failure.way in ("compiled", "outside")
    title = f"{failure.way}: {failure.what} ({failure.kind}). Seed {seed} of tests/fuzz."
    parts = [HEAD.format(title=title, mode="strict" if failure.way == "strict" else "lazy")]
    parts.append(LAZY * (failure.way == "lazy"))
    parts.append(MESH.format(shape=shape, names=names))
    parts.append(DRAWS * program.draws)
    called = [f for f in FUNCTIONS if f"{f.__name__}(" in "".join(program.lines)]
    parts += ["\n\n" + inspect.getsource(helper) for helper in called]
    parts.append("\n\n" + program.text())
    parts.append(INSIDE * inside)
    parts.append(
        RUN.format(
            seed=SEED,
            backward="    loss.backward()\n" * (bool(program.loss) and not inside),
            outputs=list(program.outputs),
            names=[leaf.name for leaf in program.leaves],
            values="\n".join(map(_value, program.leaves)),
            layouts="\n".join(f"    {leaf.placements}," for leaf in program.leaves),
            grads=[leaf.requires_grad for leaf in program.leaves],
        )
    )
    parts.append((EXPECTED_OF_DRAWS if program.draws else EXPECTED).format(function=function))
    ours = f"xd.compile({function})" if is_compiled else function
    parts.append(GOT.format(way=failure.way, function=ours))
    return "".join(parts)


def _value(leaf: Leaf) -> str:
    value = leaf.tensor().detach()
    if not value.numel():
        return f"    torch.zeros({list(value.shape)}, dtype={leaf.dtype}),"
    dtype = "" if leaf.dtype == "torch.float32" else f", dtype={leaf.dtype}"
    return f"    torch.tensor({value.tolist()}{dtype}),"
