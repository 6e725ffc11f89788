"""Where the model's tensors live on the mesh.

The last dim of a mesh with two or more dims is tensor parallel ("tp"); every other dim is data
parallel ("dp"). The batch is split over dp. Weights are split over both: tensor parallel the way
Megatron does it (wq, wk, wv, w1, w3 by output, wo, w2 by input), and their other dim over dp, as
fully sharded data parallelism does. No collective is written anywhere: XLA inserts them.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

# For a weight [out, in]: the dim that dp splits, and the dim that tp splits.
COLUMN_WISE = (1, 0)
ROW_WISE = (0, 1)
WEIGHT_DIMS = {
    # [vocab, dim]: by vocab over both. Split by dim instead, the activations would come out split
    # by dim, and XLA would carry that split into every block: 1.7 times the bytes moved.
    "tok_embeddings": (0, 0),
    "wq": COLUMN_WISE,
    "wk": COLUMN_WISE,
    "wv": COLUMN_WISE,
    "wo": ROW_WISE,
    "w1": COLUMN_WISE,
    "w2": ROW_WISE,
    "w3": COLUMN_WISE,
    "output": COLUMN_WISE,
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


def weight_dims(name: str) -> tuple[int, int] | None:
    """The dims of a parameter that (dp, tp) split; None for the norms, which are replicated.

    `name` is as in `named_parameters()`, such as "layers.0.attention.wq.weight".
    """
    return WEIGHT_DIMS.get(name.split(".")[-2])


def weight_placements(name: str, mesh: DeviceMesh) -> list[Placement]:
    dims = weight_dims(name)
    if dims is None:
        return placements(mesh, dp=Replicate(), tp=Replicate())
    return placements(mesh, dp=Shard(dims[0]), tp=Shard(dims[1]))


def shard_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replace every parameter and buffer of `model`, in place, by its sharded form."""
    for module_name, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            where = weight_placements(f"{module_name}.{name}", mesh)
            sharded = distribute_tensor(param.data, mesh, where)
            module.register_parameter(name, nn.Parameter(sharded))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, replicate(buffer, mesh))
    return model


def shard_batch(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """Split the batch, dim 0, over the data-parallel dims."""
    return distribute_tensor(tokens, mesh, placements(mesh, dp=Shard(0), tp=Replicate()))


def replicate(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole tensor on every device."""
    return distribute_tensor(tensor, mesh, placements(mesh, dp=Replicate(), tp=Replicate()))
