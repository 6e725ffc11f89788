"""`DistributedOp`: the layout rule of a custom op (a notation or methods), and their registry."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base.source_line import caller
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.base.tables.registry import Changes, Registry
from xla_dtensor.errors import LayoutRuleError
from xla_dtensor.mesh.layout import Layout
from xla_dtensor.rules import Merged, Notation, TensorInfo, infer_forward
from xla_dtensor.rules.notation import expand_ellipsis, letter_sizes, parse, validate

MAX_CACHED_LAYOUTS = 4096
"""Inferred layouts kept per op; those not used for longest go first."""


class CacheInfo(NamedTuple):
    """How often an op's layouts were known already.

    Attributes:
        hits, misses: calls whose layouts were known, and calls of ``infer_layout``.
        currsize: the number of layouts kept.
    """

    hits: int
    misses: int
    currsize: int


@dataclass(frozen=True)
class Inferred:
    """What a rule says of a call.

    Attributes:
        outputs: the layout of each tensor result.
        inputs: the layout in which each sharded input is used, or None where it stays as it is;
            None if all do.
        shapes: the global shape of each result, where the rule knows it.
        returned: what ``infer_layout`` returned; ``get_expand_impl`` gets it.
    """

    outputs: tuple[Layout, ...]
    inputs: tuple[Layout | None, ...] | None
    shapes: tuple[tuple[int, ...], ...] | None
    returned: Any


class DistributedOp:
    """The layouts of a custom op. Making an instance registers it under ``op_name``, for the
    `DFunction` with that ``_op_name``.

    Either give a notation, or write a subclass with `infer_layout`, and if needed `preprocess` and
    `get_expand_impl`, whose meanings are those of HyperParallel's class of this name.

    Args:
        op_name: the name; one op has it.
        rule: an einsum notation of the tensor arguments and results. Inputs that it wants elsewhere
            are redistributed first, and results are checked against the shapes that it implies.
        multilinear: the op is linear in each tensor argument on its own, so that a partial
            argument makes a partial result (with ``allow_partial_inputs``).
        override: replace an op that has the name already.

    Attributes:
        allow_partial_inputs: of the class: whether sharded inputs may be ``Partial``, a promise
            that the op is linear in them.

    Raises:
        LayoutRuleError: the name is taken (the message says where), or the notation is malformed.

    Example::

        import torch, xla_dtensor as xd

        class Project(xd.DFunction):
            _op_name = "Project"

            @staticmethod
            def forward(ctx, x, w):
                return x @ w

        xd.DistributedOp("Project", rule="b h, h o -> b o")
        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        x = xd.distribute_tensor(torch.ones(8, 16), mesh, [xd.Shard(0), xd.Replicate()])
        w = xd.distribute_tensor(torch.ones(16, 32), mesh, [xd.Replicate(), xd.Shard(1)])
        assert Project.apply(x, w).placements == (xd.Shard(0), xd.Shard(1))
    """

    allow_partial_inputs: ClassVar[bool] = False

    def __init__(
        self,
        op_name: str,
        *,
        rule: str | None = None,
        multilinear: bool = False,
        override: bool = False,
    ) -> None:
        known = OPS.get(op_name)
        if known is not None and not override:
            raise LayoutRuleError(
                f"a DistributedOp {op_name!r} is registered already: {type(known).__name__} at "
                f"{known.registered_at}. Pass override=True to replace it"
            )
        if rule is not None:
            try:
                validate(rule)
            except ValueError as error:
                raise LayoutRuleError(f"DistributedOp {op_name!r}: {error}") from None
        self.op_name = op_name
        self.rule = rule
        self.multilinear = multilinear
        self.registered_at: str = caller()
        self._layouts: Cache[Hashable, Inferred] = Cache(
            f"layouts of {op_name!r}", MAX_CACHED_LAYOUTS
        )
        OPS.add(op_name, self, override=override)

    def preprocess(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare a call; a subclass may implement it.

        Args:
            args: the user's positional arguments, sharded tensors as such.
            kwargs: the user's keyword arguments.

        Returns:
            None, and `infer_layout` gets the layouts; or ``(local_args, local_kwargs,
            cache_values)``: what to call ``forward`` with (``x.to_local()`` for a sharded ``x``),
            and hashable values (layouts, numbers, ...) that decide the result's layout, which
            `infer_layout` gets and the layout cache is keyed on.

        Example::

            import xla_dtensor as xd

            class Rows(xd.DistributedOp):
                def preprocess(self, args, kwargs):
                    (x,) = args
                    return (x.to_local(),), {}, [x.layout]

                def infer_layout(self, cache_values):
                    return (cache_values[0],), None

            assert Rows("Rows").infer_layout(["a layout"]) == (("a layout",), None)
        """
        return None

    def infer_layout(self, layouts_or_cache: Any, extra_args: Any = None) -> Any:
        """The layouts of the results; a subclass without a notation implements it.

        Args:
            layouts_or_cache: the `Layout` of every tensor argument (a plain tensor is replicated);
                if `preprocess` returned values, these.
            extra_args: the list of the other arguments; absent with values of `preprocess`.

        Returns:
            a `Layout`, or a tuple of one per tensor result. With values of `preprocess`
            ``(layouts, inputs)``: a tuple of one per result, and None or the layouts in which the
            sharded inputs are used, in their order.

        Raises:
            LayoutRuleError: the class doesn't implement it.

        Example::

            import torch, xla_dtensor as xd

            class LikeFirst(xd.DistributedOp):
                def infer_layout(self, layouts, extra_args=None):
                    return layouts[0]

            class Double(xd.DFunction):
                _op_name = LikeFirst("Double").op_name
                forward = staticmethod(lambda ctx, x: x * 2)

            mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
            x = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0)])
            assert Double.apply(x).placements == (xd.Shard(0),)
        """
        raise LayoutRuleError(
            f"{type(self).__name__} ({self.op_name!r}) says nothing of its layouts: implement "
            "infer_layout, or pass rule="
        )

    def get_expand_impl(
        self, func: Callable[..., Any], infer_result: Any, layouts: Any, extra_args: Any = None
    ) -> Callable[..., Any] | None:
        """What to call with the per-device arguments in place of ``func``; a subclass may implement
        it.

        Args:
            func: runs the function on per-device arguments.
            infer_result: what `infer_layout` returned.
            layouts: what it was called with: layouts or cache values.
            extra_args: the same; absent with cache values.

        Returns:
            a function of the per-device arguments, or None to call ``func``.

        Example::

            import torch, xla_dtensor as xd

            class Halved(xd.DistributedOp):
                def get_expand_impl(self, func, infer_result, layouts, extra_args=None):
                    return lambda x: func(x / 2)

            halved = Halved("Halved", rule="... -> ...").get_expand_impl(torch.abs, None, None)
            assert halved(torch.tensor(-4.0)) == 2
        """
        return None

    def cache_info(self) -> CacheInfo:
        """How often layouts were known already.

        Returns:
            ``hits`` and ``misses``, the calls whose layouts were known and those of the rule, and
            ``currsize``, the number of layouts kept.

        Example::

            import xla_dtensor as xd

            op = xd.DistributedOp("Copy", rule="... -> ...")
            assert op.cache_info() == (0, 0, 0) and op.cache_info().hits == 0
        """
        return CacheInfo(self._layouts.hits, self._layouts.misses, len(self._layouts))

    def cache_clear(self) -> None:
        """Forget inferred layouts and the counts: after a change of what `infer_layout` reads.

        Example::

            import xla_dtensor as xd

            op = xd.DistributedOp("Copy", rule="... -> ...")
            op.cache_clear()
            assert op.cache_info().currsize == 0
        """
        self._layouts.clear()
        self._layouts.hits = self._layouts.misses = 0

    def _infer(self, key: Hashable, infer: Callable[[], Inferred]) -> Inferred:
        return self._layouts.get_or_make(key, infer)

    @property
    def _describes_rule(self) -> str:
        if self.rule is not None:
            return f"rule {self.rule!r} of {self.op_name!r}"
        return f"{type(self).__name__}.infer_layout of {self.op_name!r}"


OPS: Registry[DistributedOp] = Registry("DistributedOp", Changes())
"""The registered ops by name."""


def find_op(function: type, op_name: str | None) -> DistributedOp:
    """The op registered for a `DFunction` class.

    Raises:
        ValueError: it has no name, or nobody registered it.
    """
    how = (
        'register one with DistributedOp("{0}", rule="b h -> b h") or an instance of a subclass '
        "that implements infer_layout"
    )
    name = function.__qualname__
    if op_name is None:
        raise LayoutRuleError(
            f"{name}.apply got a sharded tensor, but {name}._op_name isn't set: set it to the name "
            f"of a DistributedOp, and {how.format(function.__name__)}"
        )
    op = OPS.get(op_name)
    if op is None:
        known = ", ".join(sorted(OPS)) or "none"
        raise LayoutRuleError(
            f"{name}.apply got a sharded tensor, but no DistributedOp is registered under "
            f"{name}._op_name = {op_name!r} (registered: {known}); {how.format(op_name)}"
        )
    return op


def infer_by_notation(op: DistributedOp, infos: Sequence[TensorInfo], mesh: DeviceMesh) -> Inferred:
    """What an op's notation says; ``infos`` are of all tensor arguments."""
    assert op.rule is not None
    shapes = [info.shape for info in infos]
    try:
        notation = parse(
            expand_ellipsis(op.rule, [len(s) for s in shapes]), multilinear=op.multilinear
        )
        sizes = letter_sizes(notation, shapes)
        merged: Merged = infer_forward(notation, infos, tuple(mesh.shape))
    except ValueError as error:
        raise LayoutRuleError(
            f"{op._describes_rule} doesn't fit the arguments, of shapes {list(map(list, shapes))} "
            f"on {mesh!r}: {error}"
        ) from None
    out_shapes = _output_shapes(notation, sizes)
    outputs = tuple(
        Layout.from_placements(mesh, placements, len(term))
        for placements, term in zip(merged.outputs, notation.outputs, strict=True)
    )
    inputs = tuple(
        Layout.from_placements(mesh, placements, len(shape))
        for placements, shape in zip(merged.inputs, shapes, strict=True)
    )
    return Inferred(outputs, inputs, out_shapes, outputs)


def _output_shapes(notation: Notation, sizes: dict[str, int]) -> tuple[tuple[int, ...], ...] | None:
    """The results' shapes; None if a letter occurs in no input."""
    if any(letter not in sizes and letter != "1" for term in notation.outputs for letter in term):
        return None
    return tuple(tuple(sizes.get(letter, 1) for letter in term) for term in notation.outputs)
