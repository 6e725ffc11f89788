"""A program as a script that needs nothing of the tests: it prints expected and got."""

from __future__ import annotations

import torch

from tests.conftest import MESHES
from tests.fuzz.program import Program
from tests.fuzz.run import Failure

HEAD = '''"""{title}"""
{environment}import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd

mesh = xd.init_device_mesh("xla", {shape}, mesh_dim_names={names})
'''

REDISTRIBUTE = '''
def redistribute(x, placements):
    on_mesh = isinstance(x, xd.XLAShardedTensor)
    return x.redistribute(placements=placements) if on_mesh else x.clone()

'''

RUN = '''
def show(title, function, leaves):
    loss, outputs = function(*leaves)
{backward}    print(title)
    for name, value in zip({outputs}, outputs):
        print("  ", name, value.detach().cpu().tolist())
    for name, leaf in zip({leaves}, leaves):
        print("   afterwards", name, leaf.detach().cpu().tolist())
        if leaf.grad is not None:
            print("   gradient of", name, leaf.grad.cpu().tolist())


values = [
{values}
]
layouts = [
{layouts}
]
needs_grad = {grads}
leaves = [v.clone().requires_grad_(g) for v, g in zip(values, needs_grad)]
show("expected, by CPU torch:", {plain}, leaves)
leaves = [
    distribute_tensor(v, mesh, p).requires_grad_(g)
    for v, p, g in zip(values, layouts, needs_grad)
]
show("got, {way}:", {ours}, leaves)
'''


def script(program: Program, failure: Failure, seed: int) -> str:
    """The text of the script."""
    shape = tuple(map(int, program.mesh.split("x")))
    known = MESHES.get(program.mesh)
    mesh_names = known[1] if known else tuple(f"d{i}" for i in range(len(shape)))
    title = f"{failure.way}: {failure.what} is {failure.kind}. From seed {seed} of tests/fuzz."
    mode = "strict" if failure.way == "strict" else "lazy"
    environment = f'import os\n\nos.environ["XLA_DTENSOR_EAGER"] = "{mode}"\n'
    environment += 'os.environ.setdefault("NPROC", "64")\n'
    text = HEAD.format(title=title, environment=environment, shape=shape, names=mesh_names)
    if failure.way == "lazy":
        text += "from xla_dtensor.dispatch import lazy\n\n"
        text += "lazy.OFTEN = 0  # a few operations, too, are joined at once\n"
    if any("redistribute" in line for line in program.lines):
        text += REDISTRIBUTE
    text += "\n" + program.text()
    inside = failure.way == "compiled" and program.loss
    if inside:
        text += INSIDE
    plain, ours = "program", "program"
    if failure.way in ("compiled", "outside"):
        ours = f"xd.compile({'with_backward' if inside else 'program'})"
        plain = "with_backward" if inside else "program"
    backward = "" if inside or not program.loss else "    loss.backward()\n"
    dtype = lambda leaf: "" if leaf.dtype == "torch.float32" else f", dtype={leaf.dtype}"
    values = [f"    torch.tensor({_numbers(leaf.tensor())}{dtype(leaf)})," for leaf in program.leaves]
    for i, leaf in enumerate(program.leaves):
        if not leaf.value.numel():
            values[i] = f"    torch.zeros({list(leaf.value.shape)}{dtype(leaf)}),"
    return text + RUN.format(
        backward=backward,
        outputs=list(program.outputs),
        leaves=[leaf.name for leaf in program.leaves],
        values="\n".join(values),
        layouts="\n".join(f"    {leaf.placements}," for leaf in program.leaves),
        grads=[leaf.requires_grad for leaf in program.leaves],
        way=failure.way,
        plain=plain,
        ours=ours,
    )


INSIDE = '''

def with_backward(*leaves):
    loss, outputs = program(*leaves)
    loss.backward()
    return loss.detach(), [t.detach() for t in outputs]

'''


def _numbers(value: torch.Tensor) -> str:
    return str(value.detach().tolist())
