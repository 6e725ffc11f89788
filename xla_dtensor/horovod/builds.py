"""What Horovod says of the libraries that it was built with. XLA does what they do."""

from __future__ import annotations


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads. XLA communicates.

    Returns:
        False.

    Example::

        import xla_dtensor.horovod as hvd

        assert not hvd.mpi_threads_supported()
    """
    return False


def mpi_enabled() -> bool:
    """Whether MPI is in use. XLA communicates.

    Returns:
        False.

    Example::

        import xla_dtensor.horovod as hvd

        assert not hvd.mpi_enabled()
    """
    return False


def mpi_built() -> bool:
    """Whether it was built with MPI. XLA communicates.

    Returns:
        False.

    Example::

        import xla_dtensor.horovod as hvd

        assert not hvd.mpi_built()
    """
    return False


def gloo_enabled() -> bool:
    """Whether its Gloo is in use. XLA communicates.

    Returns:
        False.

    Example::

        import xla_dtensor.horovod as hvd

        assert not hvd.gloo_enabled()
    """
    return False


def gloo_built() -> bool:
    """Whether it was built with Gloo. XLA communicates.

    Returns:
        False.

    Example::

        import xla_dtensor.horovod as hvd

        assert not hvd.gloo_built()
    """
    return False


def nccl_built() -> int:
    """Whether it was built with NCCL (its version). XLA communicates.

    Returns:
        0.

    Example::

        import xla_dtensor.horovod as hvd

        assert not hvd.nccl_built()
    """
    return 0


def ddl_built() -> bool:
    """Whether it was built with IBM's DDL. XLA communicates.

    Returns:
        False.

    Example::

        import xla_dtensor.horovod as hvd

        assert not hvd.ddl_built()
    """
    return False


def ccl_built() -> bool:
    """Whether it was built with oneCCL. XLA communicates.

    Returns:
        False.

    Example::

        import xla_dtensor.horovod as hvd

        assert not hvd.ccl_built()
    """
    return False


def cuda_built() -> bool:
    """Whether it was built with CUDA. XLA communicates.

    Returns:
        False.

    Example::

        import xla_dtensor.horovod as hvd

        assert not hvd.cuda_built()
    """
    return False


def rocm_built() -> bool:
    """Whether it was built with ROCm. XLA communicates.

    Returns:
        False.

    Example::

        import xla_dtensor.horovod as hvd

        assert not hvd.rocm_built()
    """
    return False
