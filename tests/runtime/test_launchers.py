"""What launchers' variables mean. Those of JobSet, XPK, SkyPilot, Cloud TPU, SLURM and Open MPI are
faked here: nothing is started."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

import xla_dtensor as xd
from xla_dtensor.runtime import launchers
from xla_dtensor.runtime.launchers import Launch

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
HOROVOD = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
}
KUBEFLOW = {
    "JAX_COORDINATOR_ADDRESS": "job-0.job",
    "JAX_COORDINATOR_PORT": "6666",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, None),
        (TORCHRUN, Launch("torchrun", 3, 4, None, "torch", 1, 2)),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), Launch("torchrun", 3, 4, None, "torch", 1, None)),
        ({"WORLD_SIZE": "1"}, None),
        (HOROVOD, Launch("Horovod", 1, 2, None, "http://10.0.0.1:4000", 0, 1)),
        (
            without(HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_ADDR")
            | {"JAX_COORDINATOR_ADDRESS": "head:1234"},
            Launch("Horovod", 1, 2, "head:1234", "", 0, 1),
        ),
        (KUBEFLOW, Launch("JAX_NUM_PROCESSES", 1, 2, "job-0.job:6666")),
        (KUBEFLOW | TORCHRUN, Launch("JAX_NUM_PROCESSES", 1, 2, "job-0.job:6666")),
        (HOROVOD | TORCHRUN, Launch("torchrun", 3, 4, None, "torch", 1, 2)),
    ],
)
def test_found(variables: dict[str, str], launch: Launch | None) -> None:
    assert launchers.find(variables) == launch


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR isn't"]),
        (without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT isn't"]),
        (TORCHRUN | {"MASTER_PORT": "http"}, ["MASTER_PORT='http'", "no number"]),
        (without(TORCHRUN, "RANK"), ["RANK isn't"]),
        ({"WORLD_SIZE": "4"}, ["RANK isn't"]),
        (TORCHRUN | {"RANK": "four"}, ["RANK='four'"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK=4 of WORLD_SIZE=4"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK=-1"]),
        (without(HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_PORT"), ["JAX_COORDINATOR_ADDRESS"]),
        (without(KUBEFLOW, "JAX_COORDINATOR_ADDRESS"), ["JAX_COORDINATOR_ADDRESS isn't"]),
    ],
)
def test_refused(variables: dict[str, str], words: list[str]) -> None:
    with pytest.raises(xd.DistributedError) as error:
        launchers.find(variables)
    for word in [*words, socket.gethostname()]:
        assert word in str(error.value)


SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "node[007-010]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
# As GKE sets them for a JobSet, which XPK makes: two TPU slices of two hosts.
GKE_TPU = {
    "TPU_WORKER_HOSTNAMES": "b-0.b,b-1.b",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
}


@pytest.mark.parametrize(
    ("variables", "launch", "address"),
    [
        (SLURM, Launch("slurm", 5, 8, None, "jax", 1), "node007:"),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None, ""),
        (SLURM | {"WORLD_SIZE": "8"}, Launch("slurm", 5, 8, None, "jax", 1), "node007:"),
        (OPEN_MPI, Launch("ompi", 2, 4, None, "jax", 0), "10.96.0.1:"),
        (GKE_TPU, Launch("gketpu", 3, 4, None, "jax", None), "localhost:"),
        # SkyPilot's recipe starts torchrun with its own variables.
        (TORCHRUN | {"SKYPILOT_NODE_RANK": "1"}, Launch("torchrun", 3, 4, None, "torch", 1, 2), ""),
    ],
)
def test_what_jax_detects(
    variables: dict[str, str], launch: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax._src.clusters import cloud_tpu_cluster

    from xla_dtensor.runtime.network import rendezvous

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", variables is GKE_TPU)
    found = launchers.find(os.environ)
    assert found == launch
    if found is not None and found.meeting == "jax":
        assert rendezvous.address_of_coordinator(found, 1).startswith(address)
        monkeypatch.setenv("JAX_COORDINATOR_PORT", "777")
        assert rendezvous.address_of_coordinator(found, 1) == f"{address}777"


@pytest.mark.parametrize(
    ("launch", "ids"),
    [
        (Launch("torchrun", 3, 4, local_id=1, local_count=2), [1]),
        (Launch("torchrun", 3, 4, local_id=0, local_count=1), None),  # a host of its own
        (Launch("gketpu", 1, 2), None),
        (Launch("slurm", 1, 2, local_id=1), [1]),
    ],
)
def test_whose_accelerators(launch: Launch, ids: list[int] | None) -> None:
    assert launch.local_device_ids == ids
