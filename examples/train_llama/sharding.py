"""Where the model's tensors live on the mesh.

The last dim of a mesh with two or more dims is tensor parallel ("tp"); every other dim is data
parallel ("dp"). The batch is split over dp. Weights are split over both: tensor parallel the way
Megatron does it (wq, wk, wv, w1, w3 by output, wo, w2 by input), and their other dim over dp, as
fully sharded data parallelism does. No collective is written anywhere: XLA inserts them.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

# Of the weights [out, in], which dim tp splits; dp splits the other one.
TP_DIM = {
    "tok_embeddings": 1,  # [vocab, dim]: by dim, so that looking up a row stays local
    "wq": 0,
    "wk": 0,
    "wv": 0,
    "wo": 1,
    "w1": 0,
    "w2": 1,
    "w3": 0,
    "output": 0,
}


def mesh_dim_names(ndim: int) -> tuple[str, ...]:
    """("dp",), ("dp", "tp"), ("dp0", "dp1", "tp"), ..."""
    if ndim <= 2:
        return ("dp", "tp")[:ndim]
    return (*(f"dp{i}" for i in range(ndim - 1)), "tp")


def placements(mesh: DeviceMesh, dp: Placement, tp: Placement) -> list[Placement]:
    """One placement per mesh dim: `tp` for the dim of that name, `dp` for all others."""
    assert mesh.mesh_dim_names is not None
    return [tp if name == "tp" else dp for name in mesh.mesh_dim_names]


def weight_placements(name: str, weight: Tensor, mesh: DeviceMesh) -> list[Placement]:
    """`name` as in `named_parameters()`. Norms and the rotary tables are replicated."""
    layer = name.split(".")[-2] if "." in name else name
    if layer not in TP_DIM or weight.ndim != 2:
        return placements(mesh, dp=Replicate(), tp=Replicate())
    tp_dim = TP_DIM[layer]
    return placements(mesh, dp=Shard(1 - tp_dim), tp=Shard(tp_dim))


def shard_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replace every parameter and buffer of `model`, in place, by its sharded form."""
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, param in list(module.named_parameters(recurse=False)):
            where = weight_placements(prefix + name, param, mesh)
            sharded = distribute_tensor(param.data, mesh, where)
            module.register_parameter(name, nn.Parameter(sharded))
        for name, buffer in list(module.named_buffers(recurse=False)):
            where = placements(mesh, dp=Replicate(), tp=Replicate())
            setattr(module, name, distribute_tensor(buffer, mesh, where))
    return model


def shard_batch(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """Split the batch, dim 0, over the data-parallel dims."""
    return distribute_tensor(tokens, mesh, placements(mesh, dp=Shard(0), tp=Replicate()))


def replicate(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole tensor on every device."""
    return distribute_tensor(tokens, mesh, placements(mesh, dp=Replicate(), tp=Replicate()))
