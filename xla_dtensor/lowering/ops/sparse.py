"""Creation of sparse tensors, which XLA doesn't have: it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.registry import lowers

_CONVERSIONS = (
    "_to_sparse",
    "_to_sparse.sparse_dim",
    "_to_sparse_bsc",
    "_to_sparse_bsr",
    "_to_sparse_csc",
    "_to_sparse_csr",
)


_OF_INDICES = (
    "_sparse_coo_tensor_unsafe",
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_compressed_tensor_unsafe",
    "sparse_coo_tensor.indices",
    "sparse_coo_tensor.indices_size",
)


def _refusal(name: str, way_out: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> Any:
        raise UnsupportedOpError(f"aten::{name}: XLA has dense arrays only; {way_out}")

    return refuse


def _refuse(name: str, way_out: str) -> None:
    lowers(name)(_refusal(name, way_out))
    meta_of(name)(_refusal(name, way_out))


for _name in _CONVERSIONS:
    _refuse(
        _name,
        "keep the tensor dense (multiply by a mask), or move it to the CPU with "
        ".full_tensor().cpu() and make that sparse",
    )
for _name in _OF_INDICES:
    _refuse(
        _name,
        "give an embedding sparse=False, and its optimizer gets a dense gradient (Adam in place "
        "of SparseAdam); other sparse tensors make on the CPU",
    )
for _name in (
    "_convert_indices_from_coo_to_csr",
    "_convert_indices_from_coo_to_csr.out",
    "_convert_indices_from_csr_to_coo",
    "_convert_indices_from_csr_to_coo.out",
):
    _refuse(_name, "make the sparse tensor on the CPU, and what is dense on the devices")
