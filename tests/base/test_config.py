"""`xd.config`: what the environment says, what may be assigned, and what a block puts back."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tools import config_table
from xla_dtensor.base import assertions, executor
from xla_dtensor.base import config as module
from xla_dtensor.base.config import Config
from xla_dtensor.base.switches import SWITCHES, OneOf
from xla_dtensor.execution.lazy import Lazy
from xla_dtensor.execution.strict import Strict

ROOT = Path(__file__).parents[2]

# Of each switch: what a variable says, and what it means; the first isn't the default.
GOOD: dict[str, dict[str, Any]] = {
    "eager": {"strict": "strict", " lazy ": "lazy"},
    "checks": {"all": "all", "off": "off", "eager": "eager", "compiled": "compiled"},
    "audit": {"3": 3, "0": 0},
    "watch": {"trace": "trace", "auto": "auto"},
    "logs": {"layouts": "layouts", "layouts, layouts": "layouts"},
    "cache": {"/a/folder": "/a/folder", "off": "off", "user": "user"},
    "check_processes": {"1": "launches", "launches": "launches", "0": "programs"},
    "start_timeout": {"7.5": 7.5, "25": 25.0},
    "heartbeat_timeout": {"8": 8.0},
    "torchtitan_step": {"whole": "whole", "parts": "parts"},
    "expert_capacity": {"1.25": 1.25},
    "device_memory": {"16e9": 16e9, "15000000000": 15e9},
    "reproducible": {"across meshes": "across meshes", "on a mesh": "on a mesh"},
    "device": {"1": "xla", "xla": "xla", "0": "never", "never": "never", "auto": "auto"},
}
BAD_TEXTS = {
    "eager": ["quick", "Lazy", "1"],
    "checks": ["on", "1"],
    "audit": ["-1", "1.5", "yes"],
    "watch": ["replay", "1"],
    "logs": ["recompiles", "layouts,recompiles"],
    "check_processes": ["2", "yes"],
    "start_timeout": ["0", "-3", "soon", "nan", "inf"],
    "heartbeat_timeout": ["0", "nan"],
    "torchtitan_step": ["all"],
    "expert_capacity": ["0", "much", "None"],
    "device_memory": ["0", "16 GB", "inf"],
    "reproducible": ["yes", "across", "1"],
    "device": ["yes", "cpu", "2"],
}
BAD_VALUES: dict[str, list[Any]] = {
    "eager": ["quick", None, True, 1, ["lazy"]],
    "checks": ["on", True, None],
    "audit": [-1, 1.0, "1", True, None],
    "watch": ["replay", None, True],
    "logs": ["recompiles", None, ("layouts",)],
    "cache": [None, "", 3],
    "check_processes": ["0", 1, None],
    "start_timeout": [0, -1.0, float("nan"), float("inf"), None, "25", True],
    "heartbeat_timeout": [0, "8", None],
    "torchtitan_step": ["all", None],
    "expert_capacity": [0, -1, float("nan"), "1.25", True],
    "device_memory": [0, -1.0, float("inf"), "16e9", True],
    "reproducible": [True, "meshes", None],
    "device": ["1", 1, True, None, "cpu"],
}


def pairs(table: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def values(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SWITCHES}


@pytest.fixture
def config() -> Config:
    """One as in a process without variables; `xd.config` is another."""
    return Config({})


def test_each_switch_is_tested() -> None:
    assert list(GOOD) == list(BAD_VALUES) == list(SWITCHES)
    assert set(SWITCHES) - set(BAD_TEXTS) == {"cache"}  # any text is a folder


# --- the environment -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_begins_with_its_environment() -> None:
    """All variables at once, and what reads them sees it: operations are launched where they stand
    and are logged, and an index is looked at in a compiled step."""
    program = """
import json, sys
import xla_dtensor as xd
print(json.dumps([[getattr(xd.config, n), xd.config.source(n)] for n in json.loads(sys.argv[1])]))
assert "jax" not in sys.modules
import torch
from xla_dtensor.base import assertions, executor
x = torch.ones(3, device="xla")
print(type(executor.current()).__name__)
import jax
print(jax.config.jax_compilation_cache_dir)
step = xd.compile(lambda x, i: x[i])
try:
    step(x, torch.tensor([5]).to("xla"))
except IndexError:
    print("checked")
print(step._audit)
"""
    names = list(SWITCHES)
    first = {name: next(iter(GOOD[name])) for name in names}
    variables = {SWITCHES[name].variable: text for name, text in first.items()}
    variables["XLA_DTENSOR_CACHE"] = "off"
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_DTENSOR_", "XDG_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(names)],
        env=clean | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told, who, folder, checked, audit = done.stdout.splitlines()
    expected = {name: GOOD[name][first[name]] for name in names} | {"cache": "off"}
    assert json.loads(told) == [[expected[name], "environment"] for name in names]
    assert (who, folder, checked, audit) == ("Strict", "None", "checked", "3")
    assert "[xla_dtensor.layouts] aten::" in done.stderr


@pytest.mark.parametrize(("name", "text"), pairs(GOOD))
def test_what_a_variable_says(name: str, text: str) -> None:
    config = Config({SWITCHES[name].variable: text})
    assert values(config) == values(Config({})) | {name: GOOD[name][text]}
    assert config.source(name) == "environment"
    assert f"environment ({SWITCHES[name].variable})" in repr(config)


@pytest.mark.parametrize(("name", "text"), pairs(BAD_TEXTS))
def test_a_variable_that_says_nothing_allowed(name: str, text: str) -> None:
    variable = SWITCHES[name].variable
    with pytest.raises(ValueError) as error:
        Config({variable: text})
    assert str(error.value) == f"{variable}={text!r}: it is {SWITCHES[name].kind}"


@pytest.mark.parametrize("name", SWITCHES)
def test_an_empty_variable_says_nothing(name: str) -> None:
    config = Config({SWITCHES[name].variable: ""})
    assert values(config) == values(Config({})) and config.source(name) == "default"


def test_no_variable_is_read_elsewhere() -> None:
    """Others have some in messages, or say what an agent tells the processes that it starts."""
    package = ROOT / "xla_dtensor"
    files = [path for path in package.rglob("*.py") if "XLA_DTENSOR_" in path.read_text()]
    naming = {path.relative_to(package).as_posix() for path in files}
    in_messages = {
        "runtime/network/rendezvous.py",
        "runtime/distributed.py",
        "ecosystem/torchtitan/step.py",
    }
    of_agents = {"checkpoint/memory.py", "elastic/hosts.py"}
    assert naming == {"base/switches.py"} | in_messages | of_agents


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SWITCHES)
def test_defaults_are_allowed(name: str, config: Config) -> None:
    default = SWITCHES[name].default
    setattr(config, name, default)
    assert getattr(config, name) == default and type(getattr(config, name)) is type(default)


@pytest.mark.parametrize("name", SWITCHES)
def test_assigning(name: str, config: Config) -> None:
    value = next(iter(GOOD[name].values()))
    setattr(config, name, value)
    assert values(config) == values(Config({})) | {name: value}
    assert config.source(name) == "set"


@pytest.mark.parametrize(("name", "value"), pairs(BAD_VALUES))
def test_wrong_values(name: str, value: Any, config: Config) -> None:
    with pytest.raises(ValueError) as error:
        setattr(config, name, value)
    assert str(error.value) == f"xd.config.{name} = {value!r}: it is {SWITCHES[name].kind}"
    with pytest.raises(ValueError), config.override(**{name: value}):
        raise AssertionError
    assert values(config) == values(Config({})) and config.source(name) == "default"


def test_wrong_names(config: Config) -> None:
    with pytest.raises(AttributeError, match=r"no switch 'lazy'; it has eager, checks, .* or "):
        config.lazy = True  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no switch 'lazy'"), config.override(lazy=True):
        raise AssertionError
    with pytest.raises(AttributeError, match="no switch 'lazy'"):
        config.source("lazy")
    with pytest.raises(AttributeError):
        config.lazy  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        del config.lazy  # type: ignore[attr-defined]


def test_numbers_and_paths_are_kept_in_one_way(config: Config, tmp_path: Path) -> None:
    config.start_timeout = 3
    config.cache = tmp_path  # type: ignore[assignment]
    config.expert_capacity = 2
    assert type(config.start_timeout) is float and type(config.expert_capacity) is float
    assert config.cache == str(tmp_path)
    config.expert_capacity = None
    assert config.expert_capacity is None and config.source("expert_capacity") == "set"


def test_types_are_those_of_the_table() -> None:
    hints = {n: h for n, h in typing.get_type_hints(Config).items() if not n.startswith("_")}
    assert list(hints) == list(SWITCHES)
    for name, switch in SWITCHES.items():
        if isinstance(switch.kind, OneOf):
            assert typing.get_args(hints[name]) == switch.kind.words
        else:
            assert isinstance(switch.default, hints[name])
    attributes = (Config.__doc__ or "").partition("Attributes:")[2].partition("Raises:")[0]
    told = [line.split(":")[0].strip() for line in attributes.splitlines() if ":" in line]
    assert told == list(SWITCHES)


def test_a_switch_is_read_as_an_attribute(config: Config) -> None:
    """No function is called: hot paths do it."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(event))
    try:
        _ = config.eager
    finally:
        sys.setprofile(None)
    assert [event for event in calls if event == "call"] == []


def test_the_table(config: Config) -> None:
    config.audit = 2
    lines = str(config).splitlines()
    assert lines[0].split() == ["switch", "value", "from", "allowed"]
    assert [line.split()[0] for line in lines[1:]] == list(SWITCHES)
    assert lines[1].split()[1:] == ["'lazy'", "default", "'lazy'", "or", "'strict'"]
    assert lines[3].split()[1:3] == ["2", "set"]


def test_a_copy_is_the_same() -> None:
    """A step or a model that holds it can be copied and saved."""
    assert copy.deepcopy(xd.config) is xd.config is pickle.loads(pickle.dumps(xd.config))


# --- blocks --------------------------------------------------------------------------------------


def test_blocks_inside_of_blocks(config: Config) -> None:
    config.audit = 5
    with config.override(checks="all", audit=1):
        assert (config.checks, config.audit, config.source("checks")) == ("all", 1, "set")
        with config.override(audit=2):
            assert (config.checks, config.audit) == ("all", 2)
        assert config.audit == 1
        config.eager = "strict"  # isn't the block's
        config.checks = "off"  # is
    assert (config.checks, config.audit, config.eager) == ("eager", 5, "strict")
    assert config.source("checks") == "default" and config.source("audit") == "set"


def test_an_exception_in_a_block(config: Config) -> None:
    with pytest.raises(KeyError), config.override(checks="all"), config.override(checks="off"):
        raise KeyError
    assert config.checks == "eager" and config.source("checks") == "default"


def test_one_wrong_value_changes_nothing(config: Config) -> None:
    told: list[str] = []
    config._listen("eager", lambda: told.append(config.eager))
    with pytest.raises(ValueError), config.override(eager="strict", audit=-1):
        raise AssertionError
    assert config.eager == "lazy" and told == []


def test_as_a_decorator(config: Config) -> None:
    @config.override(audit=1)
    def found() -> int:
        return config.audit

    assert [found(), found(), config.audit] == [1, 1, 0]


def test_other_threads_see_it(config: Config) -> None:
    found: list[str] = []
    with config.override(eager="strict"):
        thread = threading.Thread(target=lambda: found.append(config.eager))
        thread.start()
        thread.join()
    assert found == ["strict"]


def test_blocks_of_threads_that_overlap(config: Config) -> None:
    """The first to begin ends first; nothing is left of either."""
    first, second = config.override(audit=1), config.override(audit=2)
    first.__enter__()
    second.__enter__()
    assert config.audit == 2
    first.__exit__(None, None, None)
    assert (config.audit, config.source("audit")) == (2, "set")
    second.__exit__(None, None, None)
    assert (config.audit, config.source("audit")) == (0, "default")


def test_many_threads_at_once(config: Config) -> None:
    together = threading.Barrier(8)

    def run(number: int) -> None:
        together.wait()
        for _ in range(200):
            with config.override(audit=number, eager="strict"):
                assert config.audit > 0 and config.eager == "strict"
            config.start_timeout = float(number)

    failed: list[BaseException] = []

    def noted(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=noted, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (config.audit, config.eager) == (0, "lazy") and 1 <= config.start_timeout <= 8


def test_who_listens_is_told_of_changes_alone(config: Config) -> None:
    told: list[str] = []
    config._listen("eager", lambda: told.append(config.eager))
    config.eager = "lazy"
    config.audit = 1
    assert told == []
    with config.override(eager="strict"):
        config.eager = "strict"
    assert told == ["strict", "lazy"]


def test_a_listener_that_raises(config: Config) -> None:
    def refuse() -> None:
        if config.eager == "strict":
            raise KeyError("mine")

    config._listen("eager", refuse)
    with pytest.raises(KeyError, match="mine"), config.override(audit=1, eager="strict"):
        raise AssertionError
    assert (config.eager, config.audit) == ("lazy", 0)


def test_what_has_been_read_once(config: Config) -> None:
    with config.override(cache="off"):
        config._fix("cache")
    assert config.cache == "off"  # it is
    config.cache = "off"
    with config.override(cache="off"):
        pass
    with pytest.raises(RuntimeError, match=r"cache = '/a': it is 'off' in this process.*CACHE"):
        config.cache = "/a"
    with pytest.raises(RuntimeError, match="when JAX starts"), config.override(cache="user"):
        raise AssertionError


# --- what the switches do ------------------------------------------------------------------------


@pytest.fixture
def untouched() -> Iterator[None]:
    with xd.config.override(**values(xd.config)):
        yield


def test_the_next_operation_is_run_as_it_says(untouched: None) -> None:
    xd.config.eager = "strict"
    assert type(executor.current()) is Strict
    with xd.config.override(eager="lazy"):
        assert type(executor.current()) is Lazy
        waits = torch.ones(2, device="xla") + 1
    assert type(executor.current()) is Strict
    assert waits.sum().item() == 4


@pytest.mark.parametrize(
    ("before", "off", "on"),
    [
        ("eager", "off", "eager"),
        ("all", "compiled", "all"),
        ("off", "off", "eager"),
        ("compiled", "compiled", "all"),
    ],
)
def test_check_indices(untouched: None, before: Any, off: str, on: str) -> None:
    """It is about eager operations, and leaves compiled steps as they are."""
    xd.config.checks = before
    assertions.check_indices(False)
    assert xd.config.checks == off
    assertions.check_indices(True)
    assert xd.config.checks == on


@pytest.mark.parametrize("checks", ["off", "eager", "compiled", "all"])
@pytest.mark.parametrize("eager", ["lazy", "strict"])
def test_who_looks_at_indices(untouched: None, checks: Any, eager: Any) -> None:
    xd.config.checks, xd.config.eager = checks, eager
    x, wrong = torch.arange(4.0).to("xla"), torch.tensor([9]).to("xla")
    raises = []
    for function in (torch.take, xd.compile(torch.take)):
        try:
            function(x, wrong).tolist()
            raises.append(False)
        except IndexError:
            raises.append(True)
    assert raises == [checks in ("eager", "all"), checks in ("compiled", "all")]


def test_steps_are_audited_that_are_made_then(
    untouched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        print("runs")
        return x + 1

    xd.config.audit = 0
    with xd.config.override(audit=1):
        audited = xd.compile(step)
    x, times = torch.ones(2, device="xla"), []
    for compiled in (audited, xd.compile(step)):
        for _ in range(3):
            compiled(x)
        times.append(capsys.readouterr().out.count("runs"))
    assert times == [3, 1]


def test_logs_are_one_switch(untouched: None, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(2, device="xla")
    with xd.config.override(logs="layouts"):
        x.relu()
    x.sigmoid()
    xd.debug.set_logs(layouts=True)
    assert xd.config.logs == "layouts"
    x.tanh()
    xd.debug.set_logs(layouts=False)
    assert xd.config.logs == ""
    told = [each.getMessage().split()[0] for each in caplog.records]
    assert told == ["aten::relu.default", "aten::tanh.default"]


def test_jax_has_started(untouched: None) -> None:
    torch.ones(2, device="xla")
    with pytest.raises(RuntimeError, match="when JAX starts, which has happened"):
        xd.config.cache = "/elsewhere"


# --- the page ------------------------------------------------------------------------------------


def test_the_page_has_this_table() -> None:
    text = config_table.PAGE.read_text()
    assert config_table.with_table(text) == text, "run python -m tools.config_table"
    assert module.config is xd.config
