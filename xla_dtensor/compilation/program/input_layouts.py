"""The shardings of a program's inputs, and other ways to compile it where XLA fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.mesh import Frame
from xla_dtensor.plans import pin
from xla_dtensor.runtime import gpus

T = TypeVar("T")


def layouts(inputs: Any) -> tuple[Any, ...]:
    """What a program's text doesn't have of its inputs: their layouts, and those that it doesn't
    use."""
    return tuple(
        (x.shape, x.dtype, getattr(x, "sharding", None)) for x in pytree.tree_leaves(inputs)
    )


def shardings_of(inputs: Any, replicated: Any) -> Any:
    """The shardings of all inputs of a program, ``replicated`` for those from the host.

    Where JAX doesn't know the memory of one input or output, it lets an output overwrite an input
    that is in another memory, and XLA fails.
    """
    return pytree.tree_map(lambda x: getattr(x, "sharding", None) or replicated, inputs)


class Pinning:
    """How a program's pins are lowered (`plans/pin.py`), as a context to lower it in: as they
    say, loosely, or, where XLA fails on that, all of them exactly.

    Attributes:
        context: which of these it is now.
    """

    def __init__(self) -> None:
        self.context: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self) -> AbstractContextManager[None]:
        return self.context()

    def loosen(self, jaxpr: Any, frame: Frame | None, inputs: Any, outputs: Iterable[Any]) -> None:
        """Lower loosely if the program can do with that (`pin.may_be_loose`).

        Args:
            outputs: the shardings of its outputs.
        """
        known = [x.sharding for x in pytree.tree_leaves(inputs) if isinstance(x, jax.Array)]
        if frame is not None and pin.may_be_loose(jaxpr, frame.jax_mesh, [*known, *outputs]):
            self.context = pin.loose

    def attempt(self, run: Callable[[], T], *anew: Callable[[], T]) -> T:
        """What ``run`` gives, or, if XLA fails, the first of the others that it doesn't fail on,
        which lower anew with all pins (`base/xla_faults.py:UNCOMPILED`)."""
        try:
            with self():
                return run()
        except jax.errors.JaxRuntimeError as error:
            if self.context is pin.tight or not anew or "RESOURCE_EXHAUSTED" in str(error):
                raise
        self.context = pin.tight
        with self():
            for again in anew[:-1]:
                try:
                    return again()
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" in str(error):
                        raise
            return anew[-1]()


def compile_somehow(
    first: Callable[[], Any], lower: Callable[[], Any], options: Any, pinning: Pinning
) -> Any:
    """Compile a program as it is; if XLA fails on it, in other ways of the same meaning.

    Args:
        first: gives it as `jax.stages.Lowered`.
        lower: lowers it anew.
        options: for XLA.
        pinning: how its pins are lowered.
    """
    return pinning.attempt(
        lambda: _compiled(first(), options),
        lambda: _compiled(apart(lower(), ("stablehlo.slice",)), options),
        lambda: _compiled(apart(lower(), ("stablehlo.slice", "stablehlo.gather")), options),
    )


def _compiled(lowered: Any, options: Any) -> Any:
    """The program compiled, with results of the sizes that it says they have: without a word XLA
    may give one fewer elements (`base/xla_faults.py:CUT_PADDING`), and memory behind it be read.

    Raises:
        JaxRuntimeError: XLA has failed, in this or another way.
    """
    compiled = gpus.compiled(lowered, options)
    outputs = pytree.tree_leaves(compiled.out_info)
    shardings = pytree.tree_leaves(compiled.output_shardings)
    analysis = compiled.memory_analysis()
    if analysis is None or len(shardings) != len(outputs):
        return compiled
    bytes_needed = sum(
        math.prod(sharding.shard_shape(out.shape)) * np.dtype(out.dtype).itemsize
        for out, sharding in zip(outputs, shardings, strict=True)
        if isinstance(sharding, jax.sharding.Sharding) and not _is_opaque(out.dtype)
    )
    # On the CPU sizes are exact, but for a pointer to each of several outputs; on other platforms
    # memory is padded.
    more = analysis.output_size_in_bytes - bytes_needed
    on_cpu = all(d.platform == "cpu" for s in shardings[:1] for d in s.device_set)
    if more < 0 or (on_cpu and more not in (0, 8 * len(outputs))):
        raise jax.errors.JaxRuntimeError(
            f"INTERNAL: XLA has compiled results of {analysis.output_size_in_bytes} bytes where "
            f"{bytes_needed} are wanted"
        )
    return compiled


def _is_opaque(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.extended))


def apart(lowered: Any, cutting: Sequence[str]) -> Any:
    """The program with the operand of each slice whole on every device, and with its result hidden
    from the partitioner, which mistakes what is cut out of padding for what it was cut out of
    (`base/xla_faults.py:CUT_PADDING`).

    Args:
        lowered: the program as `jax.stages.Lowered`, which is changed.
        cutting: the operations that are taken for slices. XLA makes slices of gathers of one
            position (seed 12847 of the fuzzer), but a table whole on every device may be too large.
    """
    cuts: list[Any] = []
    meshes: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name == "sdy.manual_computation":  # each device computes by itself there
            return ir.WalkResult.SKIP
        if operation.name == "sdy.mesh":
            meshes.append(operation)
        if operation.name in cutting:
            cuts.append(operation)
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir()
    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    for cut in cuts:
        (result,), operand = cut.results, cut.operands[0]
        with ir.InsertionPoint(cut), cut.location:
            for mesh in meshes[:1]:
                whole = sdy.DimensionShardingAttr.get([], is_closed=True)
                name = ir.StringAttr(mesh.attributes["sym_name"]).value
                rank = ir.RankedTensorType(operand.type).rank
                sharding = sdy.TensorShardingAttr.get(name, [whole] * rank)
                cut.operands[0] = sdy.ShardingConstraintOp(operand, sharding).result
        with ir.InsertionPoint.after(cut), cut.location:
            barrier = stablehlo.OptimizationBarrierOp([result])
        result.replace_all_uses_except(barrier.results[0], barrier.operation)
    return lowered
