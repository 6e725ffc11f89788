"""What the docstrings of `xla_dtensor.horovod` say: their examples run, with ranks that are the
devices of one process, and their arguments are those that are taken.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import xla_dtensor.horovod as hvd
from tests.test_docstrings import doc_of, example, section, told

pytestmark = pytest.mark.usefixtures("ranks")

PUBLIC: dict[str, Any] = {
    name: getattr(hvd, name)
    for name in hvd.__all__
    if callable(getattr(hvd, name)) and not isinstance(getattr(hvd, name), int)
} | {
    f"elastic.{name}": getattr(hvd.elastic, name)
    for name in ("ElasticSampler", "TorchState", "run")
}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
WITHOUT_EXAMPLE = {"HorovodInternalError", "PerRank", "elastic.ElasticSampler"}
"""An error's raises it (`tests/horovod/test_run.py` has it), the others are in other examples."""


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in WITHOUT_EXAMPLE])
def test_examples_run_and_say_what_comes_out(name: str) -> None:
    code = example(PUBLIC[name])
    assert code is not None and "assert" in code
    exec(compile(code, f"<example of {name}>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_and_result_is_told(name: str) -> None:
    doc = doc_of(FUNCTIONS[name])
    assert told(section(doc, "Args")) == set(inspect.signature(FUNCTIONS[name]).parameters)
    returns = str(FUNCTIONS[name].__annotations__["return"])
    assert bool(section(doc, "Returns")) == (returns != "None")


def test_the_names_are_horovods() -> None:
    """Those of horovod.torch 0.28.1, and some more, which the documentation lists."""
    names = (
        "Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet "
        "Product Sum SyncBatchNorm add_process_set allgather allgather_async allgather_object "
        "allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier "
        "broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object "
        "broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built "
        "ddl_built elastic global_process_set gloo_built gloo_enabled grouped_allgather "
        "grouped_allgather_async grouped_allreduce grouped_allreduce_ grouped_allreduce_async "
        "grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async init "
        "is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported "
        "nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built "
        "shutdown size sparse_allreduce_async start_timeline stop_timeline synchronize"
    )
    more = {"PerRank", "is_coordinator", "mesh", "per_rank", "run"}
    assert set(hvd.__all__) == set(names.split()) | more
