"""The table of docs/libraries.md: each library's version, what was run of it, and how long the
first result takes, each in a process of its own that has compiled nothing before.

make libraries-table
make libraries-table ARGS="--only einops,skorch"
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.libraries.conftest import choose
from tests.libraries.programs import PROGRAMS, Numbers, Program

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
BEGIN, END = "<!-- made by tests/libraries/table.py -->\n\n", "\n<!-- end -->\n"
HEAD = ("library", "version", "what works", "the line", "first result, s", "CPU torch, s")
_RULE = "`XLA_DTENSOR_DEVICE=1`, or nothing where there are accelerators"


def _folder() -> Path:
    return Path(tempfile.mkdtemp())


def _accelerate(device: str) -> Numbers:
    from tests.libraries import test_accelerate

    with choose(device):
        return test_accelerate.train(test_accelerate.model())[0]


def _transformers(device: str) -> Numbers:
    from tests.libraries import test_trainer

    with choose(device):
        made = test_trainer.trainer(_folder(), test_trainer.model())
        made.train()
        return test_trainer.history(made)["loss"]


def _trl(device: str) -> Numbers:
    from tests.libraries import test_trainer

    with choose(device):
        made = test_trainer.sft(_folder())
        made.train()
        return test_trainer.history(made)["loss"]


def _sentences(device: str) -> Numbers:
    from tests.libraries import test_trainer

    with choose(device):
        return test_trainer.encoder().encode(["a b", "c"]).flatten().tolist()


def _lightning(device: str) -> Numbers:
    from tests.libraries import test_lightning

    return test_lightning.fit(_folder(), test_lightning.module(), accelerator=device)[0]


def _peft(device: str) -> Numbers:
    import torch

    from tests.libraries import test_saving

    model = test_saving.adapter(test_saving.llama()).to(device)
    tokens = (torch.arange(16) % 64).reshape(2, 8).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    model.save_pretrained(_folder())
    return [loss.item()]


def _safetensors(device: str) -> Numbers:
    from safetensors.torch import load_model, save_model

    from tests.libraries import test_saving

    model, path = test_saving.llama(tied=True).to(device), str(_folder() / "file")
    save_model(model, path)
    load_model(model, path)
    return [model.lm_head.weight.sum().item()]


def _hub(device: str) -> Numbers:
    from huggingface_hub import save_torch_model

    from tests.libraries import test_saving

    model = test_saving.llama(tied=True).to(device)
    save_torch_model(model, _folder(), max_shard_size="8KB")
    return [model.lm_head.weight.sum().item()]


FOUND = (
    Program(
        "accelerate", "a loop: accumulation, clipping, bf16, fp16, save_state", _RULE, _accelerate
    ),
    Program(
        "transformers",
        "Trainer: accumulation, evaluation, bf16, fp16, resumed checkpoints",
        _RULE,
        _transformers,
    ),
    Program("trl", "SFTTrainer", _RULE, _trl),
    Program(
        "sentence_transformers", "`encode`", _RULE, _sentences, distribution="sentence-transformers"
    ),
    Program(
        "lightning",
        "Trainer and Fabric: fit, validate, precisions, resumed checkpoints, a mesh",
        '`Trainer(accelerator="xla")`',
        _lightning,
    ),
    Program("peft", "LoRA: a step, the adapter's file, merged", '`model.to("xla")`', _peft),
    Program("safetensors", "`save_model`, `load_model`", "none", _safetensors),
    Program(
        "huggingface_hub",
        "models' files in pieces, mixins",
        "none",
        _hub,
        distribution="huggingface_hub",
    ),
)
ALL = {program.package: program for program in (*FOUND, *PROGRAMS)}


def seconds(name: str, device: str) -> float:
    """How long the first run of a program takes, without importing its library."""
    program = ALL[name]
    __import__(program.package)
    import xla_dtensor  # noqa: F401

    start = time.perf_counter()
    program.run(device)
    return time.perf_counter() - start


def measured(name: str, device: str) -> str:
    """The same in a new process, which finds no compiled programs."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    own = {"JAX_PLATFORMS": "cpu", "XLA_DTENSOR_CACHE": "off", "NPROC": "64"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.libraries.table", "--run", name]
    out = subprocess.run(
        [*command, "--device", device],
        env=clean | own,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=PAGE.parents[1],
    ).stdout
    return f"{float(out.split()[-1]):.1f}"


def name_of(program: Program) -> str:
    """What the table calls its library."""
    return (program.distribution or program.package).replace("_", "-")


def row(program: Program) -> str:
    """The line of the table."""
    version = importlib.metadata.version(program.distribution or program.package.replace("_", "-"))
    times = [measured(program.package, device) for device in ("xla", "cpu")]
    return f"| {' | '.join([name_of(program), version, program.what, program.line, *times])} |\n"


def main() -> None:
    """Write the page's table, or the rows of some libraries to the terminal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="libraries, with commas between their names")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(seconds(options.run, options.device))
        return
    names = options.only.split(",") if options.only else list(ALL)
    rows = []
    for name in names:
        rows.append(row(ALL[name]))
        print(rows[-1], end="", flush=True)
    if options.only:
        return
    head = f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|\n"
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    table = BEGIN + head + "".join(rows) + END
    PAGE.write_text(pattern.sub(lambda _: table, PAGE.read_text()))


if __name__ == "__main__":
    main()
