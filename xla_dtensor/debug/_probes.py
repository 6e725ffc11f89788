"""The table of what `device.py` tests of a backend, and which operations of ours need it."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.debug import _probe_programs as programs
from xla_dtensor.debug._probe_programs import AXIS, dot, on_each, same
from xla_dtensor.lowering.workarounds import CALLS_PER_SHARD, EIGENVALUES


@dataclass(frozen=True)
class Probe:
    """One thing that a backend may lack.

    Attributes:
        name: what it is called.
        program: gives what the devices of a mesh compute, and what is right.
        stands_for: a regular expression that is found in the StableHLO of programs that need it;
            empty for what isn't in a program.
        needed_by: names of torch's or ours that need it, not all there are.
        tolerance: how far a number may be off, absolutely and relative to the right one.
        platforms: the only ones on which the package has a use for it; empty for all.
    """

    name: str
    program: programs.Program
    stands_for: str
    needed_by: tuple[str, ...]
    tolerance: float = 0.0
    platforms: tuple[str, ...] = ()


_ROUNDED = 1e-3  # of factorisations and transforms, on units that multiply in fewer digits

PROBES = (
    # --- random numbers ---
    Probe(
        "threefry",
        programs.known_threefry,
        "threefry2x32",
        ("torch.rand", "torch.randn", "torch.randperm", "F.dropout", "torch.multinomial"),
    ),
    Probe("random bits on shards", programs.random_bits, "xui32>", ("torch.rand", "F.dropout")),
    # --- dtypes ---
    Probe("float64", programs.close_to_one(np.float64), "xf64>", ("Tensor.double",), 1e-9),
    Probe(
        "complex64",
        same(lambda x: x * (3 - 1j * x), np.complex64),
        "complex<f32>",
        ("torch.complex", "torch.view_as_complex", "torch.fft.fft"),
    ),
    Probe(
        "complex128",
        programs.close_to_one(np.complex128),
        "complex<f64>",
        ("Tensor.cdouble",),
        1e-9,
    ),
    Probe(
        "int64",
        programs.large_integers,
        "xi64>",
        ("torch.arange", "torch.argmax", "F.embedding", "torch.sort"),
    ),
    Probe("int32", same(lambda x: x // 2 * 7 - 1, np.int32), "xi32>", ("Tensor.int",)),
    Probe("int8", same(lambda x: x * x * x * 3, np.int8), "xi8>", ("Tensor.char",)),
    Probe("uint8", same(lambda x: x + x, np.uint8), "xui8>", ("Tensor.byte",)),
    Probe(
        "any and all", programs.truths, r"applies stablehlo\.(or|and)\b", ("torch.any", "torch.all")
    ),
    Probe(
        "bfloat16",
        programs.converted(jnp.bfloat16),
        "xbf16>",
        ("Tensor.bfloat16", "torch.autocast"),
    ),
    Probe("float16", programs.converted(np.float16), "xf16>", ("Tensor.half",)),
    Probe(
        "float8_e4m3fn",
        programs.converted(jnp.float8_e4m3fn),
        "xf8E4M3FN>",
        ("Tensor.to(torch.float8_e4m3fn)", "aten._scaled_mm"),
    ),
    # --- products ---
    Probe("dot of float32", dot(np.float32), r"dot_general.*xf32>", ("torch.matmul", "F.linear")),
    Probe(
        "dot of bfloat16",
        dot(jnp.bfloat16, np.float32),
        r"dot_general.*xbf16>",
        ("torch.matmul of bfloat16",),
    ),
    Probe(
        "dot of float16",
        dot(np.float16, np.float32),
        r"dot_general.*xf16>",
        ("torch.matmul of float16",),
    ),
    Probe("dot of float64", dot(np.float64), r"dot_general.*xf64>", ("torch.matmul of float64",)),
    Probe(
        "dot of complex64",
        dot(np.complex64),
        r"dot_general.*complex<f32>",
        ("torch.matmul of complex64",),
    ),
    Probe("dot of int8", dot(np.int8, np.int32), r"dot_general.*xi8>", ("aten._int_mm",)),
    Probe("convolution", programs.convolution, r"stablehlo\.convolution", ("F.conv2d",)),
    # --- control flow ---
    Probe(
        "cond",
        programs.conditional,
        r"stablehlo\.case",
        ("torch.linalg.cholesky_ex", "torch.linalg.ldl_factor", "torch.randn", "torch.topk"),
    ),
    Probe(
        "while, as often as the numbers say",
        programs.loop,
        r"stablehlo\.while",
        ("torch.linalg.matrix_exp", "torch.linalg.ldl_factor"),
    ),
    Probe(
        "scan",
        programs.scan,
        r"stablehlo\.while",
        ("F.scaled_dot_product_attention", "F.ctc_loss", "xd.scan_layers", "torch.searchsorted"),
    ),
    # --- order, positions, sums ---
    Probe(
        "sort of several operands",
        programs.sort,
        r"stablehlo\.sort",
        ("torch.sort", "torch.argsort", "torch.median", "torch.mode", "torch.randperm"),
    ),
    Probe("top_k", programs.top_k, r"chlo\.top_k|mhlo\.topk", ("torch.topk", "torch.multinomial")),
    Probe(
        "gather",
        programs.gather,
        r"stablehlo\.gather",
        ("F.embedding", "torch.gather", "torch.index_select", "torch.median"),
    ),
    Probe(
        "scatter-add",
        programs.scatter_add,
        r"stablehlo\.scatter",
        ("torch.index_add", "torch.index_put", "the gradient of F.embedding"),
    ),
    Probe(
        "dynamic slice",
        programs.dynamic_slice,
        r"stablehlo\.dynamic_slice",
        ("Tensor[i] with a tensor i", "torch.linalg.solve"),
    ),
    Probe(
        "dynamic update",
        programs.dynamic_update,
        r"stablehlo\.dynamic_update_slice",
        ("Tensor[3] = 1", "torch.select_scatter"),
    ),
    Probe(
        "cumulative sum",
        programs.running_sum,
        r"stablehlo\.optimization_barrier",
        ("torch.cumsum", "torch.cumprod", "torch.cummax", "torch.logcumsumexp"),
    ),
    Probe("windows", programs.windows, r"stablehlo\.reduce_window", ("F.avg_pool2d", "torch.mode")),
    Probe(
        "fft",
        programs.fourier,
        r"stablehlo\.fft",
        ("torch.fft.fft", "torch.fft.rfft", "torch.stft"),
        _ROUNDED,
    ),
    # --- linear algebra ---
    Probe(
        "cholesky",
        programs.cholesky,
        r"stablehlo\.cholesky|_spotrf",
        ("torch.linalg.cholesky", "torch.linalg.cholesky_ex"),
        _ROUNDED,
    ),
    Probe(
        "triangular solve",
        programs.triangular_solve,
        r"stablehlo\.triangular_solve|_strsm",
        ("torch.linalg.solve_triangular", "torch.cholesky_solve", "torch.linalg.solve"),
        _ROUNDED,
    ),
    Probe(
        "lu",
        programs.lu,
        r"_sgetrf",
        ("torch.linalg.lu_factor", "torch.linalg.solve", "torch.linalg.inv"),
        _ROUNDED,
    ),
    Probe("qr", programs.qr, "_sgeqrf", ("torch.linalg.qr",), _ROUNDED),
    Probe("eigh", programs.eigh, "_ssyevd", ("torch.linalg.eigh",), _ROUNDED),
    Probe(
        "svd", programs.svd, "_sgesdd", ("torch.linalg.svd", "torch.linalg.matrix_rank"), _ROUNDED
    ),
    Probe("eig", programs.eig, "_sgeev", ("torch.linalg.eig",), _ROUNDED, EIGENVALUES.platforms),
    # --- several devices ---
    Probe(
        "sharding constraint",
        programs.resharded,
        r"sdy\.sharding_constraint",
        ("xd.XLAShardedTensor.redistribute", "torch.matmul"),
    ),
    Probe(
        "uneven shards",
        programs.uneven,
        r"stablehlo\.pad",
        ("a tensor whose length the mesh doesn't divide",),
    ),
    Probe(
        "all-reduce",
        on_each(programs.summed, lambda x: np.broadcast_to(x.sum(0), x.shape)),
        r"stablehlo\.all_reduce",
        ("xd.collectives.all_reduce",),
    ),
    Probe(
        "all-gather",
        on_each(lambda x: lax.all_gather(x, AXIS, tiled=True), programs.each_has_all),
        r"stablehlo\.all_gather",
        ("xd.collectives.all_gather",),
    ),
    Probe(
        "reduce-scatter",
        on_each(lambda x: lax.psum_scatter(x, AXIS, tiled=True), lambda x: x.sum(0)),
        r"stablehlo\.reduce_scatter",
        ("xd.collectives.reduce_scatter",),
    ),
    Probe(
        "all-to-all",
        on_each(lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True), programs.exchanged),
        r"stablehlo\.all_to_all",
        ("xd.collectives.all_to_all",),
    ),
    Probe(
        "collective-permute",
        on_each(programs.shift, lambda x: np.roll(x, 1, 0)),
        r"stablehlo\.collective_permute",
        ("xd.collectives.permute",),
    ),
    Probe(
        "custom partitioning",
        programs.custom_partitioned,
        "@CustomSPMDPartitioning",
        ("torch.special.zeta", "torch.special.gammainc", "the gradient of F.max_pool2d"),
        platforms=CALLS_PER_SHARD.platforms,
    ),
    # --- memory, the host, files ---
    Probe(
        "donation",
        programs.donated,
        r"tf\.aliasing_output|jax\.buffer_donor",
        ("Tensor.add_ in a step",),
    ),
    Probe(
        "pinned_host memory",
        programs.host_memory,
        "annotate_device_placement",
        ("xd.scan_layers(offload=True)",),
    ),
    Probe(
        "host callback",
        programs.callback,
        "python.*callback",
        ("jax.pure_callback in xd.jax_function",),
    ),
    Probe("saved programs", programs.saved, "", ("CompiledStep.save_compiled", "xd.load_compiled")),
)
