"""The exceptions that xla_dtensor raises. Each also is the builtin exception that torch raises in
the same situation, so code written for torch catches them."""

from __future__ import annotations


class XlaDTensorError(Exception):
    """Base of all exceptions raised on purpose by xla_dtensor."""


class PlacementError(XlaDTensorError, ValueError, RuntimeError):
    """Placements that don't fit the tensor or the mesh (torch raises one or the other)."""


class MeshError(XlaDTensorError, RuntimeError):
    """A mesh that cannot be made or cut as asked."""


class MeshDimError(MeshError, KeyError):
    """A mesh dim name that the mesh doesn't have."""

    __str__ = Exception.__str__  # KeyError's would quote the whole message


class DeviceCountError(MeshError):
    """A mesh that wants more devices than the XLA backend has."""


class MeshMismatchError(XlaDTensorError, RuntimeError, ValueError):
    """Tensors of different meshes in one operation."""


class LayoutRuleError(XlaDTensorError, ValueError, RuntimeError):
    """A layout rule that contradicts the operation, its tensors or the mesh."""


class UnsupportedOpError(XlaDTensorError, NotImplementedError):
    """An operation without lowering and decomposition, or an unsupported form of one."""


class DataDependentError(XlaDTensorError, RuntimeError):
    """Python that needs a tensor's value inside a compiled step."""


class PerDeviceValueError(XlaDTensorError, RuntimeError):
    """A call whose result would be a different Python value on each device of the one process."""


class StaleStepError(XlaDTensorError, RuntimeError):
    """A compiled step whose audit finds that its Python would now do something else."""
