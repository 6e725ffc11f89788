"""`Call`: the input of a layout rule: overload, arguments, shapes, mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from xla_dtensor.base.torch_private import OpOverload
from xla_dtensor.base.torch_private.attributes import schema_of
from xla_dtensor.rules.alternatives import Alternative, Merged, merge
from xla_dtensor.rules.merging import Placements, TensorInfo, replicated

OutShapes = Sequence[tuple[int, ...] | None]


@dataclass(frozen=True)
class Call:
    """One call of an overload, which a rule is asked about.

    Attributes:
        func: the overload.
        args: the arguments by schema name, defaults filled in; a `TensorInfo` for each tensor.
        out_shapes: per result its shape; None for one that is no tensor.
        mesh_shape: the sizes of the mesh dims.
        mesh: the ``DeviceMesh``, if there is one.
        given: the arguments as they were given, without defaults: ``(args, kwargs)``.

    Example::

        import torch, xla_dtensor as xd

        def by_rows(call):  # of x.cumprod(dim): a shard of another dim stays
            x, dim = call.tensor("self"), call.dim(call.tensors[0].ndim)
            assert call.name == "cumprod" and call.n_outputs == 1 and call.dims(x.ndim) == [dim]
            if x.placements == (xd.Shard(dim),):
                return call.replicate()
            rows = xd.rules.Alternative((xd.Shard(0),), (xd.Shard(0),))
            return call.merge([rows]) if x.nbytes else call.follow([x.placements], x.placements)

        xd.register_rule("aten::cumprod", by_rows, override=True)
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        x = xd.distribute_tensor(torch.ones(8, 4), mesh, [xd.Shard(0)])
        assert x.cumprod(1).placements == (xd.Shard(0),)
        assert x.cumprod(0).placements == (xd.Replicate(),)
    """

    func: OpOverload
    args: dict[str, Any]
    out_shapes: OutShapes
    mesh_shape: tuple[int, ...]
    mesh: Any = None
    given: tuple[tuple[Any, ...], dict[str, Any]] = field(default=((), {}))

    @cached_property
    def name(self) -> str:
        """The op without its namespace, overload and in-place underscore."""
        return base_name(self.func)

    @cached_property
    def tensors(self) -> list[TensorInfo]:
        """The tensor arguments, lists flattened, in schema order; `out=` tensors are left out."""
        outs = {a.name for a in schema_of(self.func).arguments if a.is_out}
        return [t for name, arg in self.args.items() if name not in outs for t in _tensors(arg)]

    @property
    def n_outputs(self) -> int:
        """The number of results."""
        return len(self.out_shapes)

    def tensor(self, name: str) -> TensorInfo:
        """What is known of a tensor argument.

        Args:
            name: the argument's, by schema.

        Returns:
            a `TensorInfo`.

        Raises:
            KeyError, AssertionError: no such argument, or it is no tensor.
        """
        value = self.args[name]
        assert isinstance(value, TensorInfo), f"{self.func}: {name} is not a tensor"
        return value

    def dim(self, ndim: int, name: str = "dim", default: int = 0) -> int:
        """An argument that is a dim, not negative.

        Args:
            ndim: the number of dims that it counts.
            name: the argument's, by schema.
            default: what it is where the argument is absent or None.

        Returns:
            a number from 0 to ``ndim - 1``.
        """
        value = self.args.get(name)
        return (default if value is None else value) % max(ndim, 1)

    def dims(self, ndim: int, name: str = "dim") -> list[int] | None:
        """An argument that is a dim or a list of dims, not negative.

        Args:
            ndim: the number of dims that they count.
            name: the argument's, by schema.

        Returns:
            numbers from 0 to ``ndim - 1``; None where the argument is absent or None.
        """
        value = self.args.get(name)
        if value is None:
            return None
        return [d % max(ndim, 1) for d in ([value] if isinstance(value, int) else value)]

    def merge(
        self,
        options: Sequence[Alternative],
        *,
        new_shards: bool = False,
        settled: bool = False,
    ) -> Merged:
        """The cheapest combination of alternatives, one per mesh dim; replicating all is always
        one.

        Args:
            options: what one mesh dim may do.
            new_shards: let a reduction of partial values end in shards (a reduce-scatter) though no
                input has shards.
            settled: a mesh dim on which the inputs have an alternative keeps it, though another
                would be cheaper for all mesh dims together.

        Returns:
            the layouts of all tensor arguments and results.
        """
        return merge(
            options,
            self.tensors,
            self.n_outputs,
            self.mesh_shape,
            new_shards=new_shards,
            settled=settled,
        )

    def follow(self, inputs: Sequence[Placements], *outputs: Placements) -> Merged:
        """The given layouts.

        Args:
            inputs: of each tensor argument the placements to use it in.
            outputs: of each result its placements; a single one serves all results.

        Returns:
            them, as `Merged`.
        """
        outs = outputs * self.n_outputs if len(outputs) == 1 else outputs
        return Merged(tuple(inputs), tuple(outs))

    def replicate(self) -> Merged:
        """Everything replicated.

        Returns:
            the layouts of all tensor arguments and results.
        """
        whole = replicated(self.mesh_shape)
        return Merged((whole,) * len(self.tensors), (whole,) * self.n_outputs)


def base_name(func: OpOverload) -> str:
    """The op's name without its namespace, overload and in-place underscore."""
    name = schema_of(func).name.split("::")[1]
    dunder = name.startswith("__") and name.endswith("__")
    return name if dunder else name.removesuffix("_")


def _tensors(value: object) -> Iterator[TensorInfo]:
    if isinstance(value, TensorInfo):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def bind(func: OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call by schema name, with defaults."""
    bound = {}
    for i, argument in enumerate(schema_of(func).arguments):
        if i < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def tensors_text(call: Call) -> str:
    shapes = [list(t.shape) for t in call.tensors]
    return f"tensors of shapes {shapes} on a mesh of shape {call.mesh_shape}"
