"""`Configuration`: a mesh, layouts of parameters and batch, and which layers are recomputed."""

from __future__ import annotations

import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.movement.factories import distribute_module

Dims = tuple[int | None, ...]
"""For each mesh dim the dim of a tensor that it shards, or None."""


@dataclass(frozen=True)
class Configuration:
    """One way to lay a training step out.

    Attributes:
        mesh: the sizes of the mesh's dims, by name, in the mesh's order.
        batch: for each of these which dim of the step's arguments it shards, or None.
        recompute: what is computed again in backward: ``"nothing"``; ``"layers"``, each of the
            model's equal layers (`repeated_layers`); ``"attention"``, of each of these the parts
            that are called so (`attentions`).
        parameters: by name for each mesh dim which dim of the parameter it shards, or None. What
            isn't there is whole on all devices, as buffers are.
        microbatches: in how many parts the step computes its batch, one after the other; what makes
            the step sees to that (`xla_dtensor.tune`).
        offload: whether what the step keeps for backward is in the host's memory; likewise.

    Example::

        import torch, xla_dtensor as xd
        from xla_dtensor.tuning import Configuration

        found = Configuration({"dp": 2, "tp": 4}, (0, None), "nothing", {"weight": (None, 0)})
        model = found.apply(torch.nn.Linear(8, 8))
        (x,) = found.place(torch.ones(4, 8))
        assert model.weight.placements == (xd.Replicate(), xd.Shard(0))
        assert model(x).placements == (xd.Shard(0), xd.Shard(1))
    """

    mesh: Mapping[str, int]
    batch: Dims
    recompute: str = "nothing"
    parameters: Mapping[str, Dims] = field(default_factory=dict)
    microbatches: int = 1
    offload: bool = False

    def __post_init__(self) -> None:
        parameters = {name: tuple(dims) for name, dims in self.parameters.items()}
        object.__setattr__(self, "batch", tuple(self.batch))
        object.__setattr__(self, "parameters", parameters)

    def device_mesh(self) -> Any:
        """The mesh, of the devices that are here or in the current ``xd.abstract`` block."""
        with warnings.catch_warnings():  # that a dim leaves a slice, which the price says
            warnings.simplefilter("ignore")
            return init_device_mesh("xla", (*self.mesh.values(),), mesh_dim_names=(*self.mesh,))

    def apply(self, model: nn.Module) -> nn.Module:
        """Lay a model's parameters out, and wrap the layers that are computed again. Before an
        optimizer is made of the parameters: they are others afterwards.

        Args:
            model: changed in place.

        Returns:
            the model.
        """
        mesh, names = self.device_mesh(), {m: name for name, m in model.named_modules()}

        def lay_out(_: str, module: nn.Module, mesh: Any) -> None:
            # With those that the module has by another name, too: each is told where it lies.
            own = module.named_parameters(recurse=False, remove_duplicate=False)
            for key, parameter in list(own):
                path = f"{names[module]}.{key}" if names[module] else key
                dims = self.parameters.get(path, (None,) * len(self.mesh))
                laid_out = distribute_tensor(parameter.detach(), mesh, placements(dims))
                made = nn.Parameter(laid_out, requires_grad=parameter.requires_grad)
                module.register_parameter(key, made)

        distribute_module(model, mesh, lay_out)
        for module in computed_again(model, self.recompute):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        return model

    def place(self, *batch: Any) -> tuple[Any, ...]:
        """The step's arguments on the mesh: tensors, in containers, too, as ``batch`` says. One
        that lacks the dim, or whose dim the devices don't divide, is whole; all else stays."""
        mesh, sizes = self.device_mesh(), [*self.mesh.values()]

        def placed(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return distribute_tensor(x, mesh, placements(divided(self.batch, x.shape, sizes)))

        found: tuple[Any, ...] = pytree.tree_map(placed, batch)
        return found

    def as_code(self) -> str:
        """The same as a torch program's lines, with nothing of `xd.tune` in them: a mesh, a
        function that lays a model out, and one for the batch."""
        again = _AGAIN[self.recompute]
        functions: list[Any] = [pattern_of, *again]
        return _CODE.format(
            shape=(*self.mesh.values(),),
            names=(*self.mesh,),
            table="".join(f'    "{p}": {_text(d)},\n' for p, d in self._patterns().items()),
            whole=_text((None,) * len(self.mesh)),
            batch=_text(self.batch),
            parts="".join(f"{name.upper()} = {value}\n" for name, value in self.told().items()),
            checkpoint=_CHECKPOINT.format(again[-1].__name__) if again else "",
            imported=_CHECKPOINTS if again else "",
            functions="\n\n".join(map(inspect.getsource, functions)),
        )

    def as_dict(self) -> dict[str, Any]:
        """Of what JSON has; `Configuration(**d)` is the same again."""
        return {
            "mesh": dict(self.mesh),
            "batch": list(self.batch),
            "recompute": self.recompute,
            "parameters": {name: list(dims) for name, dims in self.parameters.items()},
            "microbatches": self.microbatches,
            "offload": self.offload,
        }

    def told(self) -> dict[str, Any]:
        """What the step itself sees to, of what isn't as usual."""
        parts = {} if self.microbatches == 1 else {"microbatches": self.microbatches}
        return {**parts, "offload": True} if self.offload else parts

    def idle(self) -> list[str]:
        """The mesh's dims that shard neither a parameter nor the batch."""
        used = (self.batch, *self.parameters.values())
        return [name for i, name in enumerate(self.mesh) if all(dims[i] is None for dims in used)]

    def describe(self) -> str:
        """In a line: the mesh, and what each of its dims shards."""
        if not self.parameters and not any(d is not None for d in self.batch):
            return " ".join(f"{name}={size}" for name, size in self.mesh.items())  # a script's
        parts = []
        for i, (name, size) in enumerate(self.mesh.items()):
            what = [] if self.batch[i] is None else ["batch" if self.batch[i] == 0 else "sequence"]
            cut = sum(dims[i] is not None for dims in self.parameters.values())
            what += [f"{cut} of {len(self.parameters)} parameters"] if cut else []
            parts.append(f"{name}={size} ({', '.join(what) or 'nothing'})")
        again = "" if self.recompute == "nothing" else f", {self.recompute} computed again"
        several = "" if self.microbatches == 1 else f", {self.microbatches} microbatches"
        away = ", on the host" if self.offload else ""
        return " ".join(parts) + again + several + away

    def _patterns(self) -> dict[str, Dims]:
        """The layouts by name, with ``*`` for the number of a layer where all layers agree."""
        by_pattern: dict[str, dict[str, Dims]] = {}
        for name, dims in self.parameters.items():
            by_pattern.setdefault(pattern_of(name), {})[name] = dims
        found: dict[str, Dims] = {}
        for pattern, own in by_pattern.items():
            alike = len(set(own.values())) == 1
            found.update({pattern: next(iter(own.values()))} if alike else own)
        return {p: dims for p, dims in found.items() if any(d is not None for d in dims)}


def pattern_of(name: str) -> str:
    """A parameter's name with ``*`` for numbers: equal layers' parameters have the same."""
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)


def placements(dims: Iterable[int | None]) -> list[Any]:
    """torch's placements, one for each mesh dim."""
    return [Replicate() if d is None else Shard(d) for d in dims]


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: what its longest list of modules of one class consists of. None if it
    has no such list."""
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential))
    alike = [[*m] for m in lists if len(m) > 1 and len({type(each) for each in m}) == 1]
    with_parts = [each for each in alike if any(True for _ in each[0].children())]
    return max(with_parts, key=len, default=[])


def attentions(model: nn.Module) -> list[nn.Module]:
    """The parts of these layers that are called attention, by their own name or their class's, and
    consist of others. None if there are no such parts."""
    found: list[nn.Module] = []
    for layer in repeated_layers(model):
        inside = {layer}
        for name, module in layer.named_modules():
            words = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
            is_one = "attention" in words or "attn" in words
            if is_one and module not in inside and any(True for _ in module.children()):
                found.append(module)
                inside.update(module.modules())
    return found


_AGAIN: dict[str, list[Callable[[nn.Module], list[nn.Module]]]] = {
    "nothing": [],
    "layers": [repeated_layers],
    "attention": [repeated_layers, attentions],
}
"""What finds that which is computed again, with what it needs."""
RECOMPUTED = ("nothing", "attention", "layers")
"""What may be computed again, from little to much."""


def computed_again(model: nn.Module, what: str) -> list[nn.Module]:
    """The modules that are.

    Args:
        model: that they are of.
        what: one of `RECOMPUTED`.
    """
    return _AGAIN[what][-1](model) if _AGAIN[what] else []


def divided(dims: Dims, shape: Sequence[int], sizes: Sequence[int]) -> Dims:
    """``dims`` of a tensor of this shape: without those that it lacks, or doesn't divide."""

    def fits(dim: int) -> bool:
        devices = math.prod(size for d, size in zip(dims, sizes, strict=True) if d == dim)
        return dim < len(shape) and shape[dim] % devices == 0

    return tuple(d if d is not None and fits(d) else None for d in dims)


def _text(dims: Iterable[int | None]) -> str:
    return f"[{', '.join('Replicate()' if d is None else f'Shard({d})' for d in dims)}]"


_CHECKPOINTS = "\nfrom torch.utils.checkpoint import checkpoint"
_CHECKPOINT = """\
    for module in {}(model):
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
"""
_CODE = """\
import functools
import math
import re

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor{imported}

import xla_dtensor as xd

mesh = xd.init_device_mesh("xla", {shape}, mesh_dim_names={names})
{parts}PLACEMENTS = {{
{table}}}


{functions}

def parallelize(model: nn.Module) -> nn.Module:
    names = {{module: name for name, module in model.named_modules()}}

    def lay_out(_, module, mesh):
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        for key, parameter in list(own):
            path = f"{{names[module]}}.{{key}}" if names[module] else key
            lie = PLACEMENTS.get(path, PLACEMENTS.get(pattern_of(path), {whole}))
            laid_out = distribute_tensor(parameter.detach(), mesh, lie)
            module.register_parameter(key, nn.Parameter(laid_out, parameter.requires_grad))

    xd.distribute_module(model, mesh, lay_out)
{checkpoint}    return model


def place(x: torch.Tensor) -> torch.Tensor:
    batch = {batch}

    def divides(p):
        devices = math.prod(mesh.size(i) for i, other in enumerate(batch) if other == p)
        return p.is_replicate() or (p.dim < x.ndim and x.shape[p.dim] % devices == 0)

    return distribute_tensor(x, mesh, [p if divides(p) else Replicate() for p in batch])
"""
