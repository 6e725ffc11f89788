"""`hvd.mpi_built` and the like: which libraries Horovod was built with. Here XLA communicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_DOCSTRING = """{whether}. XLA communicates.

Returns:
    {answer}.

Example::

    import xla_dtensor.horovod as hvd

    assert not hvd.{name}()
"""


def _answers(answer: T, name: str, whether: str) -> Callable[[], T]:
    def function() -> T:
        return answer

    function.__name__ = function.__qualname__ = name
    function.__doc__ = _DOCSTRING.format(whether=whether, answer=answer, name=name)
    function.__annotations__ = {"return": type(answer).__name__}
    function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)
    return function


mpi_threads_supported = _answers(
    False, "mpi_threads_supported", "Whether MPI may be called from several threads"
)
mpi_enabled = _answers(False, "mpi_enabled", "Whether MPI is in use")
mpi_built = _answers(False, "mpi_built", "Whether it was built with MPI")
gloo_enabled = _answers(False, "gloo_enabled", "Whether its Gloo is in use")
gloo_built = _answers(False, "gloo_built", "Whether it was built with Gloo")
nccl_built = _answers(0, "nccl_built", "Whether it was built with NCCL (its version)")
ddl_built = _answers(False, "ddl_built", "Whether it was built with IBM's DDL")
ccl_built = _answers(False, "ccl_built", "Whether it was built with oneCCL")
cuda_built = _answers(False, "cuda_built", "Whether it was built with CUDA")
rocm_built = _answers(False, "rocm_built", "Whether it was built with ROCm")
