"""Linear algebra on the last two dims: the batch dims may be sharded."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Shard

from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import REPLICATE
from xla_dtensor.rules.registry import register

_DECOMPOSITIONS = """
    cholesky cholesky_inverse linalg_cholesky_ex linalg_inv_ex linalg_matrix_exp linalg_eig
    linalg_eigvals _linalg_eigh _linalg_svd linalg_qr geqrf linalg_lu linalg_lu_factor_ex lu_unpack
    linalg_ldl_factor_ex _linalg_det _linalg_slogdet linalg_householder_product linalg_pinv
    linalg_lstsq _linalg_eigvals _linalg_check_errors
"""

# Solvers, and which of their inputs they are linear in.
_SOLVERS = {
    "linalg_solve_triangular": 1,
    "cholesky_solve": 0,
    "linalg_lu_solve": 2,
    "linalg_ldl_solve": 2,
    "ormqr": 2,
    "_linalg_solve_ex": 1,
    "triangular_solve": 0,
}


def _batch(call: Call) -> list[Alternative]:
    out_ndims = [None if s is None else len(s) for s in call.out_shapes]
    batch = min((t.ndim for t in call.tensors if t.ndim > 1), default=2) - 2
    options = []
    for d in range(batch):

        def slot(ndim: int | None, d: int = d) -> Placement:
            return REPLICATE if ndim is None or ndim <= d else Shard(d)

        options.append(
            Alternative(
                tuple(slot(n) for n in out_ndims), tuple(slot(t.ndim) for t in call.tensors)
            )
        )
    return options


@register(*_DECOMPOSITIONS.split())
def decomposition(call: Call) -> Merged:
    """the batch dims"""
    return call.merge(_batch(call))


@register(*_SOLVERS)
def solve(call: Call) -> Merged:
    """the batch dims; linear in the right-hand side"""
    n, at = len(call.tensors), _SOLVERS[call.name]
    options = _batch(call)
    outs = (Partial(), *(REPLICATE,) * (call.n_outputs - 1))
    options.append(Alternative(outs, tuple(Partial() if i == at else REPLICATE for i in range(n))))
    return call.merge(options)
