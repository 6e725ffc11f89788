"""Text of tensors without a value, while a step is traced: only people may read it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import linecache
import logging
import pprint
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import xla_dtensor as xd

Step = Callable[[torch.Tensor], Any]
LOG = logging.getLogger("tests.text")
ADAPTER = logging.LoggerAdapter(LOG, {})
TABLE: dict[str, float] = {}
SHAPE = "shape=[], dtype=torch.float32"


@dataclasses.dataclass
class Result:
    loss: Any


class Shown:
    """A class whose objects show a tensor."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in vars(self).items()]
        return ", ".join(parts)


class Described(Shown):
    def described(self) -> str:
        return f"described: {self.loss}"

    def __str__(self) -> str:
        return self.described()


class BadLossError(ValueError):
    def __init__(self, loss: Any) -> None:
        super().__init__(f"bad: {loss}")


def described(loss: Any) -> str:
    return f"described: {loss}"


def kept(loss: Any) -> Any:
    text = f"{loss}"
    print(text)
    return TABLE.get(text)


def kept_by_another_name(loss: Any) -> Any:
    text = f"{loss}"
    print(text)
    return TABLE.get(locals()["text"])


def in_a_closure(loss: Any) -> Any:
    text = f"{loss}"
    print(text)
    return (lambda: TABLE.get(text))()


def redirected(loss: Any) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as buffer:
        print(loss)
    return TABLE.get(buffer.getvalue())


def own_print(loss: Any) -> Any:
    print = TABLE.get
    return print(f"{loss}")


def own_file(loss: Any) -> Any:
    buffer = io.StringIO()
    print(f"{loss}", file=buffer)
    return buffer.getvalue()


def sorted_by_text(loss: Any) -> Any:
    print(sorted([loss, loss + 1], key=described))


def shown_by_its_optimizer(loss: Any) -> Any:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    optimizer.param_groups[0]["lr"] = loss
    return TABLE.get(repr(optimizer))


@functools.cache
def cached(text: str) -> float:
    return 7.0


ELSEWHERE: dict[str, Step] = {
    "key": lambda loss: TABLE.get(f"{loss}", 7.0),
    "str": lambda loss: TABLE.get(str(loss)),
    "repr": lambda loss: TABLE.get(repr(loss)),
    "percent": lambda loss: TABLE.get("%s" % loss),  # noqa: UP031
    "format": lambda loss: TABLE.get("{:.2f}".format(loss)),  # noqa: UP032
    "format_builtin": lambda loss: TABLE.get(format(loss, "")),
    "spec": lambda loss: int(f"{loss:.0f}"),
    "int": lambda loss: int(f"{loss}"),
    "float": lambda loss: float(str(loss)),
    "list": lambda loss: TABLE.get(f"{[loss, 1]}"),
    "dataclass": lambda loss: TABLE.get(repr(Result(loss))),
    "object": lambda loss: TABLE.get(f"{Shown(loss)}"),
    "described": lambda loss: TABLE.get(f"{Described(loss)}"),
    "namespace": lambda loss: TABLE.get(str(SimpleNamespace(loss=loss))),
    "hash": lambda loss: hash(str(loss)),
    "cached": lambda loss: cached(f"{loss}"),
    "compared": lambda loss: f"{loss}" == "1.0",
    "returned_and_used": lambda loss: TABLE.get(described(loss)),
    "length": lambda loss: print(len(f"{loss}")),
    "looked_up_and_printed": lambda loss: print(TABLE.get(f"{loss}")),
    "walrus": lambda loss: (print(text := f"{loss}"), TABLE.get(text)),
    "kept": kept,
    "kept_by_another_name": kept_by_another_name,
    "in_a_closure": in_a_closure,
    "redirected": redirected,
    "own_print": own_print,
    "own_file": own_file,
    "sorted_by_text": sorted_by_text,
    "json": lambda loss: TABLE.get(json.dumps({"loss": loss}, default=str)),
    "pformat": lambda loss: TABLE.get(pprint.pformat(loss)),
    "pprint": lambda loss: pprint.pprint([loss], stream=io.StringIO()),
    "joined": lambda loss: TABLE.get(", ".join(f"{x}" for x in [loss])),
    "mapped": lambda loss: TABLE.get(*map(str, [loss])),
    "key_of_a_dict": lambda loss: print({f"{loss}": 1}),
    "in_a_condition": lambda loss: print("a" if f"{loss}" else "b"),
    "caught": lambda loss: TABLE.get(f"{loss}", 1.0) if True else None,
    "parameter": lambda loss: TABLE.get(str(torch.nn.Parameter(loss.detach()))),
    "view": lambda loss: TABLE.get(f"{loss.reshape(1)[0]}"),
    "more_elements": lambda loss: TABLE.get(f"{loss.expand(3)}"),
    "optimizer": shown_by_its_optimizer,
}


def _step(use: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().mean()
        use(loss)
        return loss * 2

    return step


@pytest.mark.parametrize("use", ELSEWHERE.values(), ids=ELSEWHERE)
def test_text_that_goes_elsewhere_is_refused(use: Step) -> None:
    with pytest.raises(xd.DataDependentError) as error:
        xd.compile(_step(use))(torch.ones(4, device="xla"))
    message = str(error.value)
    assert message.startswith("Text of a tensor of shape [")
    assert __file__ in message and "format it after the call" in message


def raised(loss: Any) -> None:
    with contextlib.suppress(ValueError):
        raise ValueError(f"bad {loss}, {loss:.2f}, " + ", ".join(str(x) for x in [loss]))


def raised_from_a_variable(loss: Any) -> None:
    message = f"bad {loss}"
    message += "!" if message else f"{loss}" if False else "?"


def raised_later(loss: Any) -> None:
    message = f"bad {loss}"
    message += f" and {loss}"
    with contextlib.suppress(ValueError):
        raise ValueError(message)


def raised_by_its_class(loss: Any) -> None:
    with contextlib.suppress(BadLossError):
        raise BadLossError(loss)


def made_before(loss: Any) -> None:
    error = ValueError(f"bad {loss}")
    error.add_note(f"it is {loss}")
    with contextlib.suppress(ValueError):
        raise error


def checked(loss: Any) -> None:
    torch._assert(True, f"bad {loss}")
    with contextlib.suppress(RuntimeError):
        torch._check(loss is None, lambda: f"bad {loss}")


def warned(loss: Any) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        warnings.warn(f"bad {loss}", stacklevel=2)
        warnings.warn(described(loss), stacklevel=2)


def logged(loss: Any) -> None:
    LOG.warning("loss %s", loss)
    LOG.warning(f"loss {loss}")
    LOG.warning(f"loss {loss:.2f}", stacklevel=2)
    ADAPTER.warning(f"loss {loss}")
    logging.getLogger("tests.text").warning("loss {}".format(loss))  # noqa: UP032
    LOG.warning(loss)


def printed(loss: Any) -> None:
    print(loss, [loss], Result(loss), Shown(loss), Described(loss))
    print(f"loss {loss} {loss:.2f}", f"{[loss]}", f"{Result(loss)!r}", f"{Shown(loss)}")
    print(str(loss), repr(loss), "%s" % loss, "{:.3f}".format(loss))  # noqa: UP031, UP032
    print("loss " + str(loss), f"{loss}".ljust(70), f"{loss}" if loss is not None else "")
    print("\n".join(f"{name}: {value}" for name, value in {"loss": loss}.items()))
    print(*[f"{value}" for value in [loss]], sep=", ")
    print(f"loss {loss}", file=sys.stderr)
    sys.stdout.write(f"loss {loss}\n")


def printed_from_a_variable(loss: Any) -> None:
    text = f"loss {loss}"
    if loss.ndim == 0:
        text = text + f", again {loss}"
    lines = [f"{text}", ", ".join(f"{x}" for x in [loss])]
    print("\n".join(lines), end=f"{loss}\n")


def printed_by_a_function(loss: Any) -> None:
    print(described(loss), f"and {described(loss)}", {"loss": f"{loss}"})


def printed_as_it_is(loss: Any) -> None:
    print(json.dumps({"loss": 1.0}), torch.nn.Parameter(loss.detach()))
    pprint.pprint({"loss": loss, "more": [loss] * 9})


def on_a_progress_bar(loss: Any) -> None:
    with tqdm(total=1, file=io.StringIO()) as bar:
        bar.set_postfix(loss=loss)
        bar.set_description(f"loss {loss}")
        bar.set_postfix({"loss": f"{loss:.3f}"})


def in_a_hook(loss: Any) -> None:
    x = torch.ones(2, device="xla", requires_grad=True) * loss.detach()
    x.register_hook(lambda grad: print(f"gradient {grad}"))
    x.sum().backward()


def nowhere(loss: Any) -> None:
    text = f"{loss}"  # noqa: F841
    f"{loss}"


SHOWN: dict[str, Step] = {
    use.__name__: use
    for use in (
        *(raised, raised_later, raised_by_its_class, made_before, checked, warned),
        *(logged, printed, printed_from_a_variable, printed_by_a_function, printed_as_it_is),
        *(on_a_progress_bar, in_a_hook, nowhere),
    )
}


@pytest.mark.parametrize("use", SHOWN.values(), ids=SHOWN)
def test_what_people_read_shows_the_shape(
    use: Step, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = xd.compile(_step(use))
    for scale in (1.0, 2.0):
        assert compiled(torch.full((4,), scale, device="xla")).item() == 2 * scale**2
    # What is reached of tqdm and of a logger's adapter is known when they have run.
    assert compiled.traces == (2 if use in (logged, on_a_progress_bar) else 1)
    out = capsys.readouterr()
    if use in (printed, printed_by_a_function, printed_as_it_is):
        assert SHAPE in out.out
    if use is logged:
        assert SHAPE in caplog.text
        for loss in ("1.0", "4.0"):
            assert sum(f"loss {loss}" in message for message in caplog.messages) == 4


def test_a_number_that_is_printed_is_that_of_the_call(capsys: pytest.CaptureFixture) -> None:
    """A tensor of no dims is a number in an f-string, known when the step has run."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.sum()
        printed_from_a_variable(loss)
        print(f"{loss:.3f}", ", ".join([f"{loss}", "more"]), sep=f"; {loss}; ")
        return loss

    texts = []
    for run, device in ((step, "cpu"), (xd.compile(step), "xla")):
        for scale in (1.0, 2.0):
            run(torch.full((4,), scale, device=device))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "loss 8.0, again 8.0" in texts[0]


def test_an_error_of_the_users_stays_one() -> None:
    def step(x: torch.Tensor) -> None:
        raise BadLossError(x.sum())

    with pytest.raises(BadLossError, match=r"bad: XLATensor\(shape=\[\]"):
        xd.compile(step)(torch.ones(4, device="xla"))


def test_text_that_is_a_result_is_refused() -> None:
    with pytest.raises(xd.DataDependentError, match="Text of a tensor"):
        xd.compile(lambda x: f"{x.sum()}")(torch.ones(4, device="xla"))


NO_SOURCE = {
    "print(x)": True,
    "print('a', f'sum {x}', x)": True,
    "print(str(x) + '!', end='')": True,
    "print([f'{x} and {x:.2f}'])": True,
    "log.warning(f'{x}')": True,
    "log.warning('%s' % x)": True,
    "raise ValueError(f'{x}')": True,
    "assert log is None, f'{x}'": True,
    "names.get(f'{x}')": False,
    "print(names.get(f'{x}'))": False,
    "print(f'{names.get(str(x))}')": False,
    "print(f'{x}' == 'a')": False,
    "print(f'{x}', file=io.StringIO())": False,
    "assert f'{x}' == 'a'": False,
    "text = f'{x}'; print(text)": False,
    "print(described(x))": False,
    "names.get(described(x))": False,
}


@pytest.mark.parametrize("line", NO_SOURCE)
def test_where_there_is_no_source(line: str) -> None:
    """The plain cases are told by their instructions."""
    names: dict[str, Any] = {"log": LOG, "names": TABLE, "io": io, "described": described}
    exec(f"def step(x):\n    x = x.sum()\n    {line}\n    return x", names)
    step, x = xd.compile(names["step"]), torch.ones(4, device="xla")
    if NO_SOURCE[line]:
        with contextlib.suppress(ValueError, AssertionError):
            assert step(x).item() == 4
    else:
        with pytest.raises(xd.DataDependentError, match="Text of a tensor"):
            step(x)


def step_of(path: Path, text: str) -> Callable[..., Any]:
    """A compiled step whose source is in a file of its own."""
    path.write_text(text)
    names: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), names)
    return xd.compile(names["step"])


def test_an_assertion(tmp_path: Path) -> None:
    """In a file of its own: here pytest puts code of its own in the place of assertions."""
    text = "def step(x):\n    assert x is None, f'bad {x.sum()}'\n"
    step = step_of(tmp_path / "asserting.py", text)
    with pytest.raises(AssertionError, match="bad XLATensor"):
        step(torch.ones(4, device="xla"))


def test_a_file_that_is_edited_meanwhile(tmp_path: Path) -> None:
    """A later trace runs the code that was there when the program began."""
    path = tmp_path / "edited_meanwhile.py"
    text = "def step(x, n):\n    if n > 1:\n        print(f'sum {x.sum()}')\n    return x * n\n"
    step, x = step_of(path, text), torch.ones(4, device="xla")
    step(x, 1)
    path.write_text("import os\n\n\n" + text.replace("print", "os.getenv"))
    linecache.checkcache(str(path))
    assert step(x, 2)[0].item() == 2


def test_text_in_what_is_computed_again() -> None:
    """A checkpointed block runs twice in a trace."""

    def block(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        TABLE.get(f"{y}")
        return y

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False).sum()

    x = torch.ones(4, device="xla", requires_grad=True)
    with pytest.raises(xd.DataDependentError, match="Text of a tensor of shape \\[4\\]"):
        xd.compile(step)(x)


class Telling(torch.nn.Module):
    def __init__(self, use: Step) -> None:
        super().__init__()
        self.use = use
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.use(self.scale)
        return self.linear(x) * self.scale


@pytest.mark.parametrize("shown", [False, True])
def test_state_in_the_body_of_a_loop(shown: bool) -> None:
    """One body is for all layers, whose buffers differ."""
    use = printed if shown else ELSEWHERE["key"]
    layers = torch.nn.ModuleList([Telling(use) for _ in range(3)]).to("xla")
    looped = xd.scan_layers(layers)
    step, x = xd.compile(lambda x: looped(x)), torch.ones(2, 4, device="xla")
    if shown:
        expected = x.cpu()
        for layer in layers.cpu():
            expected = layer.linear(expected) * 2
        layers.to("xla")
        torch.testing.assert_close(step(x).cpu(), expected)
    else:
        with pytest.raises(xd.DataDependentError, match="Text of a tensor"):
            step(x)


@pytest.mark.parametrize("place", ["cond", "while_loop"])
def test_in_branches_and_loops(place: str) -> None:
    state = torch.tensor(3.0, device="xla")

    def branch(x: torch.Tensor) -> torch.Tensor:
        TABLE.get(f"{state}")
        return x * state

    def step(x: torch.Tensor) -> Any:
        if place == "cond":
            return torch.cond(x.sum() > 0, branch, lambda x: x * 1, (x,))
        while_loop = torch._higher_order_ops.while_loop
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, branch(x)), (x.sum() * 0, x))

    with pytest.raises(xd.DataDependentError, match="Text of a tensor"):
        xd.compile(step)(torch.ones(4, device="xla"))


TEXTS: dict[str, Callable[[torch.Tensor], str]] = {
    "f": lambda x: f"{x}",
    "str": str,
    "repr": repr,
    "percent": lambda x: "%s" % x,  # noqa: UP031
    "format": "{}".format,
    "list": lambda x: f"{[x]}",
    "computed": lambda x: f"{x * 2}",
    "of_a_dataclass": lambda x: str(Result(x)),
    "of_the_first": lambda x: f"{x.flatten()[0]:.1f}",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("shape", [(), (3,), (40, 50)])
def test_text_of_state_is_what_it_is_outside(
    text: Callable[[torch.Tensor], str], shape: tuple[int, ...]
) -> None:
    state = torch.zeros(shape, device="xla")
    compiled, x = xd.compile(lambda x: (x * 2, text(state))), torch.ones(2, device="xla")
    for value in (1.0, 2.0, 2.0, 1.0):
        state.fill_(value)
        assert compiled(x)[1] == text(state)
    assert compiled.traces == 2


@pytest.mark.parametrize("text", [TEXTS["f"], TEXTS["percent"], TEXTS["list"]])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_print_options(text: Callable[[torch.Tensor], str], device: str) -> None:
    state, x = torch.tensor([1 / 3, 2.0], device=device), torch.ones(2, device="xla")
    compiled = xd.compile(lambda x: (x * 2, text(state)))
    for precision in (4, 2, 2, 3):
        torch.set_printoptions(precision=precision)
        try:
            assert compiled(x)[1] == text(state)
        finally:
            torch.set_printoptions(profile="default")
    assert compiled.traces == 3


def test_a_step_that_sets_print_options() -> None:
    state, x = torch.tensor([1 / 3, 2.0], device="xla"), torch.ones(2, device="xla")

    def step(x: torch.Tensor) -> Any:
        torch.set_printoptions(precision=2)
        text = f"{state}"
        torch.set_printoptions(profile="default")
        return x * 2, text

    compiled = xd.compile(step)
    assert [compiled(x)[1] for _ in range(3)] == ["XLATensor([0.33, 2.00], device='xla:0')"] * 3
    assert compiled.traces == 1


def test_a_constant_has_its_text() -> None:
    compiled = xd.compile(lambda x: x * float(f"{torch.full((), 3.0, device='xla')}"))
    assert compiled(torch.ones(2, device="xla"))[0].item() == 3
