"""Per-device tensors: what each device computes of its piece, and collectives between them."""

from __future__ import annotations

import torch

from tests.fuzz.draw import Draw, UnsuitableError, operation

LOCAL = ["{0}.sin()", "{0} * 0.5", "{0}.tanh()", "{0} + 0.25", "{0}.flip(-1)", "{0}.cumsum(-1)"]
LOCAL += ["{0}.softmax(-1)", "{0} - {0}.mean(-1, keepdim=True)", "{0}.square()"]


@operation(4)
def local(d: Draw) -> None:
    """From the global view to the devices', some steps there, and back."""
    name = d.pick(lambda t: t.ndim in (1, 2, 3) and t.dtype == torch.float32 and t.numel())
    shape = list(d.true[name].shape)
    into: list[str] = []
    grads: list[str] = []
    free: list[int] = []  # mesh dims along which the devices' values may differ
    varies: list[int] = []
    for axis, n in enumerate(d.mesh_shape):
        cuts = [i for i, size in enumerate(shape) if size % n == 0]
        kind = d.choice(["shard", "shard", "partial", "same"])
        if kind == "shard" and cuts:
            dim = d.choice(cuts)
            shape[dim] //= n
            into.append(f"Shard({dim})")
            grads.append(f"Shard({dim})")
            varies.append(axis)
        else:
            into.append("Replicate()")
            grads.append("Replicate()" if kind == "same" else "Partial('sum')")
        if kind != "same" or grads[-1].startswith("Shard"):
            free.append(axis)
    default = "Partial('sum')" not in grads and d.chance(0.5)
    given = "None" if default else f"[{', '.join(grads)}]"
    (x,) = d.let_local(f"to_local({name}, [{', '.join(into)}], {given}, mesh)")
    for _ in range(d.rng.randint(1, 4)):
        x = _step(d, x, shape, free, varies)
    back = []
    for axis in range(len(d.mesh_shape)):
        if axis in free:
            # (torch's gradient of Partial("avg") isn't the mean's, and ours is torch's)
            back.append(d.choice([*(f"Shard({i})" for i in range(len(shape))), "Partial('sum')"]))
        else:
            back.append("Replicate()")
    # Cloned, for a write to it would be one to the local tensor, too; on the CPU it is a copy.
    # A DTensor has the strides of its local tensors; those of the stack are others.
    d.let(
        f"from_local({x}, [{', '.join(back)}], mesh).clone(memory_format=torch.contiguous_format)"
    )


def _step(d: Draw, x: str, shape: list[int], free: list[int], varies: list[int]) -> str:
    """One step on the devices; changes ``shape`` to the result's."""
    if not free or d.chance(0.35):
        text = d.choice(LOCAL).format(x)
        return d.let_local(text)[0]
    axis = d.choice(free)
    n = d.mesh_shape[axis]
    kinds = ["all_reduce", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "permute"]
    kind = d.choice([*kinds, "all_to_all", "index", "max"])
    where = f"mesh, {axis})"
    if kind == "all_reduce":
        return d.let_local(f"all_reduce({x}, 'sum', {where}")[0]
    if kind == "max":
        op = d.choice(["max", "min", "avg"])
        (other,) = d.let_local(f"all_reduce({x}.detach(), {op!r}, {where}")
        return d.let_local(f"{x} - {other}")[0]
    if kind == "all_gather":
        dim = d.choice(range(len(shape)))
        shape[dim] *= n
        return d.let_local(f"all_gather({x}, {dim}, {where}")[0]
    if kind == "broadcast":
        return d.let_local(f"broadcast({x}, {d.rng.randrange(n)}, {where}")[0]
    if kind == "permute":
        return d.let_local(f"permute({x}, {d.rng.sample(range(n), n)}, {where}")[0]
    if kind == "index":
        number = f"of_devices(axis_index(mesh, {axis}), {len(shape)})"
        return d.let_local(f"{x} * ({number} + 1)")[0]
    dims = [0] if kind == "all_to_all" else [i for i, size in enumerate(shape) if size % n == 0]
    dim = d.choice(dims)
    if shape[dim] % n:
        raise UnsuitableError
    if kind == "all_to_all":
        return d.let_local(f"all_to_all({x}, {where}")[0]
    shape[dim] //= n
    return d.let_local(f"reduce_scatter({x}, {dim}, {where}")[0]
