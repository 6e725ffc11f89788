"""`XLATensor`: the per-device view, a tensor that each device of the process holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.base.source_line import user_line
from xla_dtensor.tensors.backend import backend
from xla_dtensor.tensors.base import TensorMethods
from xla_dtensor.tensors.printing import text_of

# What a `DTensor` has, and this has not.
_OF_SHARDED = frozenset({"device_mesh", "full_tensor", "placements", "redistribute", "to_local"})


def not_in_a_body(name: str) -> str:
    """Why there is no ``name`` of a tensor that a branch or the body of a loop is given."""
    return (
        f"{name} in a branch or the body of a loop of a compiled step, whose tensors are whole and "
        "have no placements: lay out before it, and give it the result as an operand (or capture "
        f"that), or after it{user_line()}"
    )


class XLATensor(TensorMethods, torch.Tensor):
    """A tensor on the "xla" device: what each device holds.

    Its value is the same on every device (``full_tensor()``, ``torch.zeros(..., device="xla")``),
    or *varies* along mesh axes (``to_local()``): ``shape`` is then that of one device's value, and
    operations run on each device's value by itself. One that doesn't vary computes with sharded
    tensors as if it were replicated, and ``.cpu()`` brings its value to the host.

    Made by torch's factories and ``.to("xla")``, ``to_local()``, `from_device_values` and
    operations; not by calling the class.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        ones = torch.ones(3, device="xla")
        assert isinstance(ones, xd.XLATensor) and ones.cpu().tolist() == [1, 1, 1]
        y = ones * xd.collectives.axis_index(mesh)  # each device's own
        assert y.varying == ("dp",) and y.local_values()[5].tolist() == [5, 5, 5]
    """

    # Where `torch.xla` has it. Libraries (opt_einsum, autoray) choose their functions for a tensor
    # by the package that its class is of, and took xla tensors for arrays of NumPy's.
    __module__ = "torch.xla"

    if not TYPE_CHECKING:  # every name would be known

        def __getattr__(self, name: str) -> Any:
            if name in _OF_SHARDED and executor.current().in_body:
                raise AttributeError(not_in_a_body(name), name=name, obj=self)
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=self)

    @property
    def varying(self) -> tuple[str, ...]:
        """The names of the mesh axes along which the devices' values differ (may differ); () if
        they are the same.

        Example::

            import torch, xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            assert torch.ones(3, device="xla").varying == ()
            assert xd.collectives.axis_index(mesh, "tp").varying == ("tp",)
        """
        return self._form.varying

    def local_values(self) -> list[torch.Tensor]:
        """Every device's value.

        Returns:
            CPU tensors of the tensor's shape and dtype, in the order of the root mesh's devices;
            one if the tensor has met no mesh yet.

        Raises:
            DataDependentError: in a compiled step.

        Example::

            import xla_dtensor as xd

            mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))
            index = xd.collectives.axis_index(mesh)
            assert [v.item() for v in index.local_values()] == [0, 1, 2, 3]
        """
        return backend().local_values(self)

    def wait(self) -> XLATensor:
        """The tensor itself: torch's functional collectives return tensors that have to be waited
        for, and XLA's values are awaited when they are looked at.

        Returns:
            the tensor.

        Example::

            import torch, xla_dtensor as xd
            import torch.distributed._functional_collectives as funcol

            mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
            total = funcol.all_reduce(torch.ones(3, device="xla"), "sum", (mesh, 0)).wait()
            assert total.tolist() == [8, 8, 8]
        """
        return self

    def _copy(self) -> Any:
        return self.detach().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return text_of(self, type(self).__name__, [f"device='{self.device}'"])
