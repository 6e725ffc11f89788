"""``DistributedOp`` with HyperParallel's further names, and the registry by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_dtensor.custom_ops import distributed_op
from xla_dtensor.errors import LayoutRuleError, PlacementError


class DistributedOp(distributed_op.DistributedOp):
    """`xla_dtensor.DistributedOp`, with what HyperParallel's subclasses call.

    A second instance of one name takes the place of the first, as there.

    Example::

        import torch, xla_dtensor as xd
        from xla_dtensor.compat.hyper_parallel import DistributedOp, DFunction

        class Twice(DistributedOp):
            def __init__(self):
                super().__init__("Twice of the example")

            def preprocess(self, args, kwargs):
                return (args[0].to_local(),), {}, [args[0].layout]

            def infer_layout(self, cache_values):
                self._check_partial_inputs(cache_values)
                return (cache_values[0],), None

        class TwiceFunc(DFunction):
            _op_name = Twice().op_name
            forward = staticmethod(lambda ctx, x: x * 2)

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        x = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0)])
        assert TwiceFunc.apply(x).full_tensor().tolist() == [2] * 8
    """

    def __init__(self, op_name: str, **kwargs: Any) -> None:
        super().__init__(op_name, **{"override": True, **kwargs})

    def _check_partial_inputs(self, layouts: Sequence[Any]) -> None:
        """Raise if a reduction is pending in an input, unless the op allows it.

        Raises:
            PlacementError: one is; a ValueError.
        """
        if self.allow_partial_inputs:
            return
        for number, layout in enumerate(layouts):
            if layout is not None and layout.is_partial():
                raise PlacementError(
                    f"{self.op_name!r}: input {number} is partial ({layout!r}), and the op isn't "
                    "linear: reduce it first, x.reduce_partial(), or set allow_partial_inputs"
                )


def get_distributed_op(op_name: str) -> distributed_op.DistributedOp:
    """The op that is registered under a name.

    Raises:
        LayoutRuleError: there is none; a ValueError.
    """
    op = distributed_op.OPS.get(op_name)
    if op is None:
        raise LayoutRuleError(
            f"no DistributedOp is registered under {op_name!r}; there are "
            f"{', '.join(sorted(distributed_op.OPS)) or 'none'}"
        )
    return op
