"""What importing costs, and when devices come into being: in fresh processes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest

CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("JAX_", "XLA_", "TF_CPP_")) and name != "NPROC"
}


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` without the variables that tests/conftest.py sets, on the CPU."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=CLEAN | {"JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def output(code: str, **env: str) -> str:
    result = run(code, **env)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_starts_no_jax() -> None:
    out = output(
        "import sys, torch, xla_dtensor as xd\n"
        "print(torch.device('xla'), torch.accelerator.current_accelerator(),"
        " xd.init_device_mesh is torch.distributed.init_device_mesh,"
        " [m for m in ('jax', 'jaxlib') if m in sys.modules])"
    )
    assert out == "xla xla True []"


@pytest.mark.slow
def test_import_time() -> None:
    """Under 0.3 s beyond importing torch."""
    code = (
        "import time, torch\n"
        "start = time.process_time()\n"
        "import xla_dtensor\n"
        "print(time.process_time() - start)"
    )
    seconds = [float(output(code)) for _ in range(5)]
    assert statistics.median(seconds) < 0.3, seconds


def test_all_names_exist() -> None:
    code = "import xla_dtensor as xd\nprint(len([getattr(xd, name) for name in xd.__all__]))"
    assert int(output(code)) > 10


@pytest.mark.parametrize("owner", ["npu", "xla"])
def test_the_device_slot_is_taken(owner: str) -> None:
    result = run(
        f"import torch\ntorch.utils.rename_privateuse1_backend({owner!r})\nimport xla_dtensor"
    )
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "RuntimeError: xla_dtensor needs torch's out-of-tree device slot (PrivateUse1), but "
        f"{owner!r} has taken it in this process. Run without that backend: don't import it "
        "(torch_npu, torchax, ...), and where torch imports it by itself, as it does with every "
        "backend that is installed (torch_tpu), set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    )


MAKE = "import torch, xla_dtensor as xd\nmesh = xd.init_device_mesh('xla', (2, 4))\n"


def test_devices_are_simulated_and_one_line_says_so() -> None:
    result = run(
        MAKE + "xd.init_device_mesh('xla', (8,)); torch.ones(3, device='xla')\n"
        "x = xd.distribute_tensor(torch.ones(8), mesh); print(len(x.jax_array.devices()))\n"
        "import os; print(os.environ['NPROC'])"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["8", "64"]
    assert result.stderr == "xla_dtensor: using 8 simulated CPU devices\n"


@pytest.mark.slow
def test_no_line_for_one_device() -> None:
    result = run("import torch, xla_dtensor as xd\nxd.init_device_mesh('xla', (1,))")
    assert (result.returncode, result.stderr) == (0, "")


def test_the_number_of_devices_can_be_set() -> None:
    out = output(
        "import xla_dtensor as xd, jax\nxd.init_device_mesh('xla', (2,))\n"
        "print(jax.device_count())",
        JAX_NUM_CPU_DEVICES="4",
    )
    assert out == "4"


START = {
    "a tensor": "torch.ones(3, device='xla')",
    "a smaller mesh": "xd.init_device_mesh('xla', (2,))",
    "JAX itself": "import jax; jax.devices()",
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("start", START)
def test_too_late(start: str) -> None:
    had = 2 if start == "a smaller mesh" else 1
    result = run(f"import torch, xla_dtensor as xd\n{START[start]}\n{MAKE}")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "xla_dtensor.errors.DeviceCountError: DeviceMesh('xla', ...) wants device 7, so 8 devices, "
        f"but JAX has {had} cpu device(s): JAX was started before this mesh was made, so simulated "
        "devices can't be added any more. Make the largest mesh first, or set "
        "JAX_NUM_CPU_DEVICES=8 before the program starts"
    )


@pytest.mark.slow
def test_impossible() -> None:
    """XLA's own flag fixes the number of devices."""
    result = run(MAKE, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "xla_dtensor.errors.DeviceCountError: DeviceMesh('xla', ...) wants device 7, so 8 devices, "
        "but JAX has 2 cpu device(s): set JAX_NUM_CPU_DEVICES=8 (and remove "
        "--xla_force_host_platform_device_count from XLA_FLAGS)"
    )


@pytest.mark.slow
def test_more_threads_than_devices_whoever_starts_jax_first() -> None:
    """With fewer threads than devices XLA's CPU collectives can wait for each other forever."""
    out = output(
        "import os, torch, xla_dtensor\ntorch.ones(3, device='xla')\nprint(os.environ['NPROC'])",
        JAX_NUM_CPU_DEVICES="8",
    )
    assert out == "64"


@pytest.mark.slow
@pytest.mark.parametrize(
    "level", [None, pytest.param("1", marks=pytest.mark.slow)], ids=["quiet", "asked"]
)
def test_xlas_own_warnings(level: str | None) -> None:
    """Of layouts between which its partitioner makes a tensor whole: unless they are asked for."""
    code = (
        "import torch, xla_dtensor as xd\n"
        "mesh = xd.init_device_mesh('xla', (2, 4))\n"
        "both, other = [xd.Shard(1), xd.Shard(1)], [xd.Shard(1), xd.Shard(0)]\n"
        "x = xd.distribute_tensor(torch.ones(5, 5), mesh, other)\n"
        "print(x.redistribute(placements=both).sum().item())\n"
    )
    env = {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    result = run(code, JAX_NUM_CPU_DEVICES="8", JAX_ENABLE_COMPILATION_CACHE="0", **env)
    assert result.stdout.strip() == "25.0"
    assert ("full rematerialization" in result.stderr) is (level is not None)


@pytest.mark.slow
def test_a_rule_by_an_ops_name_before_the_first_mesh() -> None:
    """Where an op is defined there is no mesh yet."""
    code = (
        "import torch, xla_dtensor as xd\n"
        "torch.library.define('mylib::f', '(Tensor x) -> Tensor')\n"
        "for rule in ('relu', 'aten::relu', 'elementwise_unary'):\n"
        "    xd.register_rule('mylib::f', rule, override=True)\n"
        "print(any('mylib::f' in str(rule) for rule in xd.debug.rules()))"
    )
    assert output(code) == "True"


@pytest.mark.slow
def test_optimizers_update_lists_before_there_is_a_mesh() -> None:
    code = (
        "import torch, xla_dtensor\n"
        "from torch.optim.optimizer import _default_to_fused_or_foreach as default\n"
        "own = [torch.nn.Parameter(torch.ones(3, device='xla')) for _ in range(2)]\n"
        "print(default(own, False, False), default([torch.ones(3)], False, False))"
    )
    assert output(code) == "(False, True) (False, False)"


@pytest.mark.slow
def test_optimizers_that_are_scripted_when_they_are_imported() -> None:
    """TorchScript takes torch's own formulas, not what they are wrapped in."""
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch, xla_dtensor, torch.distributed.optim as optim\n"
        "p = torch.ones(3)\n"
        "optim._FunctionalAdam([p], lr=0.5).step([torch.ones(3)])\n"
        "print(p.tolist())"
    )
    expected = output(code.replace(", xla_dtensor", ""))
    assert output(code) == expected


GPU = (
    "import os, jax, torch, xla_dtensor as xd\n"
    "from xla_dtensor.base import jax_private\n"
    "jax_private.has_visible_nvidia_gpu = lambda: True\n"
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("first", "flags", "warns"),
    [
        ("", "", False),
        ("jax.devices()", "", True),
        ("jax.devices()", "--xla_allow_excess_precision=true", False),
    ],
    ids=["we start JAX", "somebody else has", "and said how"],
)
def test_programs_for_gpus_round(first: str, flags: str, warns: bool) -> None:
    """XLA's GPU compiler leaves roundings out unless it is told before it starts."""
    code = f"{GPU}{first}\ntorch.ones(3, device='xla') + 1\ntorch.ones(2, device='xla')\n"
    done = run(f"{code}print(os.environ.get('XLA_FLAGS', ''))", XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("x.bfloat16().float() is x then") == warns
    assert ("--xla_allow_excess_precision=false" in done.stdout) == (not first)
