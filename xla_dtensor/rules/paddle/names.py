"""Paddle's sharding rules by Paddle's names, asked as Paddle's tests ask them.

    rule = spmd_rule("matmul")
    x, y = TensorSpec((64, 32), [0, -1]), TensorSpec((32, 48), [-1, 1])
    used, results = rule.infer_forward(x, y, mesh_shape=(2, 4))
    results[0].dims_mapping                      # [0, 1]

`NAMES` says which op's rule serves a name. Where Paddle has a rule for several ops in one, that op
is in `composed`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from xla_dtensor.base.torch_private import OpOverload, pytree
from xla_dtensor.base.torch_private.attributes import schema_of
from xla_dtensor.rules.alternatives import Merged
from xla_dtensor.rules.call import Call, OutShapes, bind
from xla_dtensor.rules.infer import ask, infer
from xla_dtensor.rules.merging import DimSharding, Placements, TensorInfo
from xla_dtensor.rules.paddle import composed, experts  # noqa: F401  (register ops)
from xla_dtensor.rules.paddle.backward import infer_arguments
from xla_dtensor.rules.registry import Rule, find_rule, rules

_SAME = """
    acos acosh asin asinh atan atanh bernoulli bitwise_not ceil celu conj cos cosh digamma dropout
    elu erf erfinv exp expm1 floor gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu lgamma
    log log10 log1p log2 logical_not logit mish poisson reciprocal relu relu6 round rsqrt selu
    sigmoid sign silu sin sinh softplus softshrink sqrt square tan tanh trunc
    bitwise_and bitwise_or bitwise_xor floor_divide fmax fmin heaviside logical_and logical_or
    logical_xor maximum minimum
    bmm einsum amax amin logsumexp argmax argmin
    reshape unsqueeze expand expand_as tile stack
    embedding one_hot index_put index_select triu cumsum cummax cummin argsort topk roll
    conv2d conv3d full_like nonzero
"""
"""What torch and Paddle call the same."""

_COMPOSED = """
    add_n c_softmax_with_cross_entropy c_softmax_with_multi_label_cross_entropy
    cross_entropy_with_softmax default_ default_data_parallel fused_dropout_add
    fused_linear_param_grad_add fused_rotary_position_embedding gather_nd instance_norm label_smooth
    logsigmoid matmul moe_combine moe_gate_dispatch numel prod replicated softsign squared_l2_norm
    stanh swiglu tanh_shrink thresholded_relu update_loss_scaling
"""

NAMES: dict[str, str] = {
    **{name: f"aten::{name}" for name in _SAME.split()},
    **{name: f"{composed.NAMESPACE}::{name}" for name in _COMPOSED.split()},
    # Any function of one or two elements: no reduction commutes with these.
    "elementwise_unary": "aten::cos",
    "elementwise_binary": "aten::atan2",
    "assign": "aten::clone",
    "cast": "aten::_to_copy",
    "clip": "aten::clamp",
    "fill": "aten::fill.Scalar",
    "pow": "aten::pow.Tensor_Scalar",
    "scale": "aten::mul.Scalar",
    "swish": "aten::silu",
    "add": "aten::add.Tensor",
    "elementwise_add": "aten::add.Tensor",
    "divide": "aten::div.Tensor",
    "elementwise_div": "aten::div.Tensor",
    "elementwise_mul": "aten::mul.Tensor",
    "elementwise_pow": "aten::pow.Tensor_Tensor",
    "multiply": "aten::mul.Tensor",
    "remainder": "aten::remainder.Tensor",
    "subtract": "aten::sub.Tensor",
    "not_equal": "aten::ne.Tensor",
    "greater_than": "aten::gt.Tensor",
    "less_than": "aten::lt.Tensor",
    "where": "aten::where.self",
    "matmul_v2": "paddle::matmul",
    "linear_v2": "aten::linear",
    "fused_gemm_epilogue": "aten::_addmm_activation",
    "all": "aten::all.dims",
    "any": "aten::any.dims",
    "frobenius_norm": "aten::linalg_vector_norm",
    "max": "aten::amax",
    "mean_all": "aten::mean",
    "min": "aten::amin",
    "p_norm": "aten::linalg_vector_norm",
    "reduce_base": "aten::sum.dim_IntList",
    "reduce_max": "aten::amax",
    "reduce_sum": "aten::sum.dim_IntList",
    "sum": "aten::sum.dim_IntList",
    "batch_norm": "aten::native_batch_norm",
    "fused_rms_norm": "aten::_fused_rms_norm",
    "group_norm": "aten::native_group_norm",
    "layer_norm": "aten::native_layer_norm",
    "rms_norm": "aten::_fused_rms_norm",
    "softmax": "aten::_softmax",
    "log_softmax": "aten::_log_softmax",
    "softmax_with_cross_entropy": "paddle::cross_entropy_with_softmax",
    # Torch has the heads before the positions.
    "flash_attention": "aten::scaled_dot_product_attention",
    "concat": "aten::cat",
    "expand_as_v2": "aten::expand_as",
    "flatten": "aten::flatten.using_ints",
    "pad": "aten::constant_pad_nd",
    "reshape2": "aten::reshape",
    "slice": "aten::slice.Tensor",
    "squeeze": "aten::squeeze.dims",
    "split": "aten::split_with_sizes",
    "split_with_num": "aten::chunk",
    "strided_slice": "aten::slice.Tensor",
    "transpose": "aten::permute",
    "transpose2": "aten::permute",
    "unbind": "aten::unbind.int",
    "unsqueeze2": "aten::unsqueeze",
    "c_embedding": "aten::embedding",
    "lookup_table_v2": "aten::embedding",
    "gather": "aten::index_select",
    "put_along_axis": "aten::scatter.src",
    "scatter": "aten::index_put",
    "take_along_axis": "aten::gather",
    "tril_triu": "aten::tril",
    "unique": "aten::_unique2",
    "conv2d_transpose": "aten::convolution",
    "depthwise_conv2d": "aten::conv2d",
    "adam": "aten::_fused_adam",
    "adamw": "aten::_fused_adamw",
    "sgd": "aten::_fused_sgd",
    "check_finite_and_unscale": "aten::_amp_foreach_non_finite_check_and_unscale",
}
"""The op whose rule serves a name of Paddle's. Arguments are that op's own."""


def _overload(name: str) -> OpOverload | None:
    """The overload of ``namespace::op.overload``; without one its default, or else its first."""
    namespace, _, op = NAMES.get(name, name).partition("::")
    packet_name, _, overload = op.partition(".")
    if not op:
        return None
    ops = getattr(torch.ops, namespace)
    # Rules of ops that only write in place have the functional name.
    packet = getattr(ops, packet_name, None) or getattr(ops, packet_name + "_", None)
    if packet is None:
        return None
    overloads = packet.overloads()
    chosen = overload or ("default" if "default" in overloads else overloads[0])
    return getattr(packet, chosen) if chosen in overloads else None


def rule_of_name(name: str) -> Rule | None:
    """The rule of a Paddle name or of an op, for other ops to reuse; None if there is none.

    It sees a call as one of the named op's: arguments that are called otherwise are taken by
    position, and the op's own defaults stand in for those that the call does not have.
    """
    func = _overload(name)
    rule = find_rule(func) if func is not None else None
    if func is None or rule is None:
        return None
    named = rule
    arguments = [a for a in schema_of(func).arguments if not a.is_out]

    def reused(call: Call) -> Merged | None:
        names = [a.name for a in arguments]
        args: dict[str, Any] = {}
        for i, (own, value) in enumerate(call.args.items()):
            free = i < len(names) and names[i] not in call.args and own not in names
            args[names[i] if free else own] = value
        for argument in arguments:
            args.setdefault(argument.name, argument.default_value)
        return ask(named, replace(call, func=func, args=args))

    reused.__doc__ = rule.__doc__
    return reused


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's shape and sharding, as Paddle's ``DistTensorSpec``.

    `dims_mapping` has per tensor dim -1, a mesh dim, or a list of mesh dims, the outermost first.
    `partial` lists ``(mesh dim, reduction)``; `strided` is `DimSharding`'s.
    """

    shape: tuple[int, ...]
    dims_mapping: list[int | list[int]]
    partial: tuple[tuple[int, str], ...] = ()
    dtype: torch.dtype = torch.float32
    strided: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.dims_mapping):
            raise ValueError(
                f"dims_mapping {self.dims_mapping} has {len(self.dims_mapping)} entries for the"
                f" {len(self.shape)} dims of shape {tuple(self.shape)}"
            )

    @classmethod
    def of(cls, info: TensorInfo, mesh_shape: Sequence[int]) -> TensorSpec:
        sharding = DimSharding.from_placements(info.placements, info.ndim, mesh_shape)
        return cls(
            info.shape, sharding.dims_mapping, sharding.partial, info.dtype, sharding.strided
        )

    def info(self, mesh_shape: Sequence[int]) -> TensorInfo:
        """As the rules see it. ValueError for a mesh dim that the mesh has not, or used twice."""
        sharding = DimSharding.from_dims_mapping(self.dims_mapping, self.partial)
        apart = {m for m, _, _ in self.strided}
        dims = tuple(tuple(m for m in order if m not in apart) for order in sharding.dims)
        sharding = DimSharding(dims, self.partial, self.strided)
        used = [m for order in sharding.dims for m in order] + [m for m, _ in self.partial]
        if any(not 0 <= m < len(mesh_shape) for m in used):
            raise ValueError(f"{self.dims_mapping} names a mesh dim that {mesh_shape} has not")
        placements = sharding.placements(mesh_shape)
        return TensorInfo(tuple(self.shape), placements, self.dtype)


class InferredSpecs(NamedTuple):
    inputs: list[TensorSpec]
    """The tensor arguments as they are used, lists flattened."""
    outputs: list[TensorSpec]


@dataclass(frozen=True)
class SpmdRule:
    """The rule of one op, as ``core.get_phi_spmd_rule`` returns it."""

    name: str
    func: OpOverload

    def infer_forward(
        self,
        *args: Any,
        mesh_shape: Sequence[int],
        out_shapes: OutShapes | None = None,
        **attrs: Any,
    ) -> InferredSpecs:
        """The op's arguments, with a `TensorSpec` for each tensor. `out_shapes` are those of the
        results where an op without values cannot tell. ValueError if the rule has no answer."""
        outputs = self._outputs(args, attrs, out_shapes)
        mesh = tuple(mesh_shape)
        args, attrs = _infos((args, attrs), mesh)
        merged = infer(self.func, args, attrs, [t.shape for t in outputs], mesh)
        return self._specs(merged, args, attrs, outputs, mesh)

    def infer_backward(self, *args: Any, mesh_shape: Sequence[int], **attrs: Any) -> InferredSpecs:
        """The op's arguments and the results: the last tensors (or lists of them) that are given.

        The arguments' own shardings count for nothing.
        """
        count = len(schema_of(self.func).returns)
        tensors = [i for i, arg in enumerate(args) if _is_tensors(arg)]
        given = tensors[len(tensors) - count :] if count <= len(tensors) else []
        outputs = pytree.tree_leaves([args[i] for i in given])
        if not outputs:
            raise TypeError(f"{self.name}: infer_backward takes the inputs and then the results")
        mesh = tuple(mesh_shape)
        rest = tuple(arg for i, arg in enumerate(args) if i not in given)
        args, attrs, wanted = _infos((rest, attrs, outputs), mesh)
        merged = infer_arguments(self.func, args, attrs, wanted, mesh)
        return self._specs(merged, args, attrs, wanted, mesh)

    def _outputs(self, args: tuple, attrs: dict, shapes: OutShapes | None) -> list[TensorInfo]:
        """The results' shapes and dtypes, from running the op without values."""
        if shapes is not None:
            return [TensorInfo(tuple(s or ()), (), torch.float32) for s in shapes]

        def empty(spec: TensorSpec) -> torch.Tensor:
            return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

        args, attrs = pytree.tree_map_only(TensorSpec, empty, (args, attrs))
        results = pytree.tree_leaves(self.func(*args, **attrs))
        tensors = [t for t in results if isinstance(t, torch.Tensor)]
        return [TensorInfo(tuple(t.shape), (), t.dtype) for t in tensors]

    def _specs(
        self,
        merged: Merged | None,
        args: tuple,
        attrs: dict,
        outputs: Sequence[TensorInfo],
        mesh: tuple[int, ...],
    ) -> InferredSpecs:
        if merged is None:
            raise ValueError(f"{self.name}: the rule leaves this call to the compiler")
        call = Call(self.func, bind(self.func, args, attrs), (), mesh)

        def specs(infos: Sequence[TensorInfo], layouts: Sequence[Placements]) -> list[TensorSpec]:
            laid_out = zip(infos, layouts, strict=True)
            return [TensorSpec.of(replace(t, placements=p), mesh) for t, p in laid_out]

        return InferredSpecs(specs(call.tensors, merged.inputs), specs(outputs, merged.outputs))


def spmd_rule(name: str) -> SpmdRule:
    """The rule of a name of Paddle's ("matmul"), or of an op ("aten::mm", "mylib::op.overload").

    ValueError for an unknown name, saying which are close, and for an op without a rule.
    """
    func = _overload(name)
    if func is None:
        close = difflib.get_close_matches(name, [*NAMES, *rules()], n=5)
        hint = f"; close to it are {', '.join(close)}" if close else ""
        raise ValueError(f"{name!r} is neither an op nor a rule's name{hint}")
    if find_rule(func) is None:
        raise ValueError(f"{name} has no layout rule: its layouts are the compiler's choice")
    return SpmdRule(name, func)


def _infos(tree: Any, mesh_shape: tuple[int, ...]) -> Any:
    return pytree.tree_map_only(TensorSpec, lambda spec: spec.info(mesh_shape), tree)


def _is_tensors(arg: object) -> bool:
    """Whether `arg` is a tensor or a (possibly empty) list of them."""
    if isinstance(arg, (list, tuple)):
        return all(isinstance(leaf, TensorSpec) for leaf in pytree.tree_leaves(arg))
    return isinstance(arg, TensorSpec)
