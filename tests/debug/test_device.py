"""``python -m xla_dtensor.debug.device``: what simulated devices can, how each way to fail is told,
and that operations need what the table says.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.debug import _probe_child, device
from xla_dtensor.debug._probes import PROBES

ROOT = Path(__file__).parents[2]

# As `python -m xla_dtensor.debug.device`, with other probes, and no backend in this process.
COMMAND = """
import sys
from xla_dtensor.base import jax_private
from xla_dtensor.debug import device
status = device.main(sys.argv[2:], sys.argv[1] or None)
assert not jax_private.backends_are_initialized()
sys.exit(status)
"""


def command(*arguments: str, path: Path | None = None) -> list[str]:
    return [sys.executable, "-c", COMMAND, "" if path is None else str(path), *arguments]


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, path=path), cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_simulated_devices_can_do_it_all(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = run("--devices", "8", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert (report["backend"]["platform"], report["backend"]["devices"]) == ("cpu", 8)
    assert report["backend"]["jax"] == jax.__version__
    assert [(one["name"], one["word"]) for one in report["probes"]] == [
        (probe.name, "ok") for probe in PROBES
    ]
    lines = done.stdout.splitlines()
    assert len({re.search(r" \d+\.\d s  ok$", x).start() for x in lines[: len(PROBES)]}) == 1
    assert f"cpu: 8 of 'cpu' (cpu)\nJAX {jax.__version__}" in done.stdout
    assert done.stdout.endswith(f"\n{len(PROBES)} ok\n")


# --- how backends fail ---------------------------------------------------------------------------

TABLE = """
import atexit, os, sys, time
import numpy as np
from xla_dtensor.debug._probes import Probe

def fine(mesh):
    return [np.arange(4)], [np.arange(4)]

def wrong(mesh):
    return [np.array([1, 2, 3, 5])], [np.arange(4)]

def narrow(mesh):
    return [np.zeros(3, np.int32)], [np.zeros(3, np.int64)]

def close(mesh):
    return [np.array([1.0, 1.1])], [np.array([1.001, 1.0])]

def fails(mesh):
    raise NotImplementedError("\\nno such thing\\nat all")

def hangs(mesh):
    if len(sys.argv) > 1 and os.path.isdir(os.environ.get("PIDS", "")):
        open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w").close()
    time.sleep(1000)

def aborts(mesh):
    os.write(2, b"F0000 00:00:00 x.cc:1] Check failed: good\\n*** a stack ***\\n")
    os.abort()

def leaves(mesh):
    os._exit(3)

def ends_badly(mesh):
    atexit.register(os._exit, 7)
    return fine(mesh)

PROBES = (
    Probe("first", fine, "", ("torch.first",)),
    Probe("wrong", wrong, "", ("torch.add", "torch.sub")),
    Probe("narrow", narrow, "", ()),
    Probe("close", close, "", (), 0.01),
    Probe("fails", fails, "", ()),
    Probe("elsewhere", fails, "", (), platforms=("tpu",)),
    Probe("hangs", hangs, "", ("torch.wait",)),
    Probe("aborts", aborts, "", ()),
    Probe("not asked", fine, "", ()),
    Probe("leaves", leaves, "", ()),
    Probe("last", ends_badly, "", ("torch.last",)),
)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "table.py"
    made.write_text(TABLE)
    return made


@pytest.mark.slow
def test_each_way_to_fail_is_told_and_hides_no_other(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    asked = ["--only", *re.findall(r'Probe\("(\w+)"', TABLE)]
    done = run("--platform", "cpu", "--timeout", "1.5", "--json", str(file), *asked, path=path)
    assert done.returncode == 1, done.stdout + done.stderr
    told = dict(re.findall(r"^(\w+) +\d+\.\d s  (.*)$", done.stdout, re.MULTILINE))
    assert told == {
        "first": "ok",
        "wrong": "wrong: 4 of 4 numbers, the first 1 in place of 0",
        "narrow": "wrong: the result is int32[3], not int64[3]",
        "close": "wrong: 1 of 2 numbers, the first 1.1 in place of 1.0",
        "fails": "failed: NotImplementedError: no such thing",
        "elsewhere": "unused: the package does without on cpu",
        "hangs": "timed out (killed after 1.5 s)",
        "aborts": "ended the process (signal 6): F0000 00:00:00 x.cc:1] Check failed: good",
        "leaves": "ended the process (exit status 3)",
        "last": "ok",
        "end": "ended the process (exit status 7)",
    }
    assert "  wrong (wrong) is needed by torch.add, torch.sub\n" in done.stdout
    assert "  hangs (timed out) is needed by torch.wait\n" in done.stdout
    assert "torch.last" not in done.stdout and "torch.first" not in done.stdout
    assert [one["name"] for one in json.loads(file.read_text())["probes"]] == list(told)


@pytest.mark.slow
def test_a_backend_that_does_not_start(path: Path) -> None:
    done = run("--platform", "nowhere", path=path)
    assert done.returncode == 1
    assert re.match(r"start +\d+\.\d s  failed: .*nowhere", done.stdout)
    assert done.stdout.endswith("\n1 failed, 11 not run\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "first", "nope"], "there is no 'nope', but first, wrong"),
        (["--timeout", "0"], "--timeout is a number of seconds"),
        (["--timeout", "nan"], "--timeout is a number of seconds"),
        (["--platform", "tpu", "--devices", "8"], "which the CPU alone has"),
        (["--devices", "0"], "which the CPU alone has"),
        (["--json", "no/such/folder/x"], "there is no folder no/such/folder"),
        (["--nope"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        device.main(arguments, str(path))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.fixture
def waiting(path: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command whose child hangs, and the child."""
    pids = tmp_path / "pids"
    pids.mkdir()
    # A shell's background jobs ignore Ctrl-C, and so would what they start: not with a handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command("--platform", "cpu", "--only", "hangs", path=path),
        cwd=ROOT,
        env=os.environ | {"PIDS": str(pids)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    try:
        (child,) = eventually(lambda: [int(x.name) for x in pids.iterdir()])
        assert lives(child)
        yield process, child
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_an_interrupt_leaves_no_child(waiting: tuple[subprocess.Popen[str], int]) -> None:
    process, child = waiting
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert not lives(child)
    assert time.monotonic() - began < 5
    assert process.stderr is not None and process.stderr.read() == "interrupted\n"


@pytest.mark.slow
def test_a_child_ends_with_a_command_that_is_killed(
    waiting: tuple[subprocess.Popen[str], int],
) -> None:
    process, child = waiting
    process.kill()
    assert eventually(lambda: not lives(child), 20)


def test_differences() -> None:
    one = np.ones((2, 3))
    assert _probe_child.difference(one, one, 0) == ""
    assert _probe_child.difference(one, np.ones((3, 2)), 9).startswith("the result is float64[2,3]")
    assert "1 of 6 numbers, the first nan" in _probe_child.difference(
        np.where(np.arange(6).reshape(2, 3) == 4, np.nan, 1), one, 0.1
    )
    narrow = one.astype(jnp.bfloat16)
    assert _probe_child.difference(narrow, narrow, 0) == ""
    assert (
        _probe_child.difference(narrow, one, 0) == "the result is bfloat16[2,3], not float64[2,3]"
    )


# --- what needs what -----------------------------------------------------------------------------


def cut(*shape: int) -> DTensor:
    values = torch.linspace(0.5, 2, int(np.prod(shape))).reshape(shape)
    return xd.distribute_tensor(values, make_mesh("8"), [Shard(0)])


def places() -> DTensor:
    return xd.distribute_tensor(torch.arange(16), make_mesh("8"), [Shard(0)])


def gradient(function: Callable[..., Any], x: Any) -> Any:
    x = x.detach().requires_grad_()
    function(x).sum().backward()
    return x.grad


def put_one(x: Any) -> Any:
    x = x.clone()
    x[3] = 1
    return x


def on_each(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: function(x.to_local(), make_mesh("8"))


MODULES: dict[str, Any] = {}


@pytest.fixture
def modules() -> None:
    """Made outside of the steps that use them."""
    if not MODULES:
        layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        made = {"linear": nn.Linear(16, 16), "convolution": nn.Conv2d(3, 4, 3), "layers": layers}
        MODULES.update({name: module.to("xla") for name, module in made.items()})


def with_offload(x: Any) -> Any:
    xd.scan_layers(MODULES["layers"], offload=True)(x).sum().backward()


def autocast(x: Any) -> Any:
    with torch.autocast("xla"):
        return F.linear(x, x)


def through_jax(x: Any) -> Any:
    like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return xd.jax_function(lambda x: jax.pure_callback(np.sin, like, x))(x)


def products(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda x: torch.matmul(x.to(dtype), x.to(dtype))


def scaled(x: Any) -> Any:
    one, small = torch.ones((), device="xla"), x.to(torch.float8_e4m3fn)
    return torch._scaled_mm(small, small.t(), one, one)


X, IMAGES, ROWS = (lambda: cut(16, 16)), (lambda: cut(8, 3, 8, 8)), places
WHOLE = lambda: torch.ones(16, 16).to("xla")

# A program that has the operation: a function, and what makes its arguments.
PROGRAMS: dict[str, tuple[Callable[..., Any], ...]] = {
    "torch.rand": (
        lambda: torch.distributed.tensor.rand(
            16, 16, device_mesh=make_mesh("8"), placements=[Shard(0)]
        ),
    ),
    "torch.randn": (torch.randn_like, X),
    "torch.randperm": (lambda: torch.randperm(16, device="xla"),),
    "torch.multinomial": (lambda x: torch.multinomial(x, 3), WHOLE),
    "F.dropout": (F.dropout, X),
    "Tensor.double": (lambda x: x.double() * 2, X),
    "Tensor.cdouble": (lambda x: x.cdouble() * 2, X),
    "Tensor.half": (lambda x: x.half() * 2, X),
    "Tensor.int": (lambda x: x.int() * 2, X),
    "Tensor.char": (lambda x: x.char() * 2, X),
    "Tensor.byte": (lambda x: x.byte() * 2, X),
    "Tensor.bfloat16": (lambda x: x.bfloat16() * 2, X),
    "torch.autocast": (autocast, X),
    "Tensor.to(torch.float8_e4m3fn)": (lambda x: x.to(torch.float8_e4m3fn).float(), X),
    "torch.complex": (lambda x: torch.complex(x, x), X),
    "torch.view_as_complex": (lambda x: torch.view_as_complex(x.reshape(16, 8, 2)) * 2, X),
    "torch.arange": (lambda: torch.arange(16, device="xla") * 2,),
    "torch.argmax": (lambda x: x.argmax(1), X),
    "torch.any": (lambda x: (x > 0).any(), X),
    "torch.all": (lambda x: (x > 0).all(), X),
    "torch.matmul": (torch.matmul, X, X),
    "F.linear": (lambda x: MODULES["linear"](x), X),
    **{
        f"torch.matmul of {name}": (products(getattr(torch, name)), X)
        for name in ("bfloat16", "float16", "float64", "complex64")
    },
    "aten._int_mm": (lambda x: torch._int_mm(x.char(), x.char()), X),
    "aten._scaled_mm": (scaled, X),
    "F.conv2d": (lambda x: MODULES["convolution"](x), IMAGES),
    "torch.linalg.cholesky": (torch.linalg.cholesky, X),
    "torch.linalg.cholesky_ex": (torch.linalg.cholesky_ex, X),
    "torch.linalg.ldl_factor": (torch.linalg.ldl_factor, X),
    "torch.linalg.matrix_exp": (torch.linalg.matrix_exp, X),
    "torch.linalg.solve_triangular": (
        lambda x: torch.linalg.solve_triangular(x, x, upper=False),
        X,
    ),
    "torch.cholesky_solve": (torch.cholesky_solve, X, X),
    "torch.linalg.solve": (torch.linalg.solve, X, X),
    "torch.linalg.lu_factor": (torch.linalg.lu_factor, X),
    "torch.linalg.inv": (torch.linalg.inv, X),
    "torch.linalg.qr": (torch.linalg.qr, X),
    "torch.linalg.eigh": (torch.linalg.eigh, X),
    "torch.linalg.svd": (torch.linalg.svd, X),
    "torch.linalg.matrix_rank": (torch.linalg.matrix_rank, X),
    "torch.linalg.eig": (torch.linalg.eig, X),
    "torch.topk": (lambda x: x.topk(3), WHOLE),
    "F.scaled_dot_product_attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q),
        lambda: cut(8, 2, 4096, 16),
    ),
    "F.ctc_loss": (
        lambda x, y: F.ctc_loss(x.reshape(16, 1, 16), y[None, 1:5], [16], [4]),
        X,
        ROWS,
    ),
    "xd.scan_layers": (lambda x: xd.scan_layers(MODULES["layers"])(x), X),
    "xd.scan_layers(offload=True)": (with_offload, X),
    "torch.searchsorted": (torch.searchsorted, X, X),
    "torch.sort": (torch.sort, X),
    "torch.argsort": (torch.argsort, X),
    "torch.median": (torch.median, X),
    "torch.mode": (torch.mode, X),
    "F.embedding": (F.embedding, ROWS, X),
    "the gradient of F.embedding": (
        lambda x, rows: gradient(lambda x: F.embedding(rows, x), x),
        X,
        ROWS,
    ),
    "torch.gather": (lambda x, rows: torch.gather(x, 1, rows[:, None]), X, ROWS),
    "torch.index_select": (lambda x, rows: x.index_select(0, rows), X, ROWS),
    "torch.index_add": (lambda x, rows: x.index_add(0, rows, x), X, ROWS),
    "torch.index_put": (lambda x, rows: x.index_put((rows,), x, accumulate=True), X, ROWS),
    "Tensor[i] with a tensor i": (lambda x, rows: x[rows[0]], X, ROWS),
    "Tensor[3] = 1": (put_one, X),
    "torch.select_scatter": (lambda x: x.select_scatter(x[0], 0, 3), X),
    "torch.cumsum": (lambda x: x.cumsum(1), X),
    "torch.cumprod": (lambda x: x.cumprod(0), X),
    "torch.cummax": (lambda x: x.cummax(1), X),
    "torch.logcumsumexp": (lambda x: x.logcumsumexp(1), X),
    "F.avg_pool2d": (lambda x: F.avg_pool2d(x, 2), IMAGES),
    "torch.fft.fft": (torch.fft.fft, X),
    "torch.fft.rfft": (torch.fft.rfft, X),
    "torch.stft": (
        lambda x: torch.stft(x, 8, window=torch.ones(8, device="xla"), return_complex=True),
        X,
    ),
    "xd.XLAShardedTensor.redistribute": (lambda x: x.redistribute(placements=[Replicate()]), X),
    "a tensor whose length the mesh doesn't divide": (lambda x: x * 2, lambda: cut(13, 16)),
    "xd.collectives.all_reduce": (on_each(xd.collectives.all_reduce), X),
    "xd.collectives.all_gather": (on_each(xd.collectives.all_gather), X),
    "xd.collectives.reduce_scatter": (
        on_each(xd.collectives.reduce_scatter),
        lambda: cut(64, 16),
    ),
    "xd.collectives.all_to_all": (on_each(xd.collectives.all_to_all), lambda: cut(64, 16)),
    "xd.collectives.permute": (
        on_each(lambda x, mesh: xd.collectives.permute(x, mesh, [*range(1, 8), 0])),
        X,
    ),
    "torch.special.zeta": (torch.special.zeta, X, X),
    "torch.special.gammainc": (torch.special.gammainc, X, X),
    "the gradient of F.max_pool2d": (lambda x: gradient(lambda x: F.max_pool2d(x, 2), x), IMAGES),
    "Tensor.add_ in a step": (lambda x: (x.add_(1), None)[1], X),
    "jax.pure_callback in xd.jax_function": (through_jax, X),
}


@functools.cache
def text(name: str) -> str:
    """The StableHLO of a step that does it."""
    function, *makers = PROGRAMS[name]
    with xd.config.override(checks="off"):  # looking at indices is other operations
        return xd.compile(function).lower(*(make() for make in makers)).as_text()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("probe", "name"),
    [(p, name) for p in PROBES if p.stands_for for name in p.needed_by],
    ids=lambda x: getattr(x, "name", x),
)
def test_what_is_said_to_need_it_needs_it(modules: None, probe: Any, name: str) -> None:
    assert re.search(probe.stands_for, text(name))


def test_a_plain_program_needs_next_to_nothing() -> None:
    """What the patterns are found in isn't every program."""
    plain = xd.compile(lambda x: x * 2).lower(cut(16, 16)).as_text()
    assert [p.name for p in PROBES if p.stands_for and re.search(p.stands_for, plain)] == []


def test_few_are_not_of_programs() -> None:
    assert [p.name for p in PROBES if not p.stands_for] == ["saved programs"]
    assert len({p.name for p in PROBES}) == len(PROBES)
    assert all(p.needed_by for p in PROBES)
