"""Real text that every machine has: the sources of Python's standard library, as bytes."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
SIZE_CAP = 4_000_000  # bytes: far more than the default run reads
FILE_CAP = 100_000  # bytes of each file: a few very long files are tables


def stdlib_bytes() -> bytes:
    """The sources in alphabetical order of their paths, up to SIZE_CAP bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = sorted(name.as_posix() for name in names if not SKIPPED_FOLDERS & set(name.parts))
    text = bytearray()
    for name in kept:
        text += (root / name).read_bytes()[:FILE_CAP]
        if len(text) >= SIZE_CAP:
            break
    return bytes(text[:SIZE_CAP])


def load(text_file: Path | None = None, val_fraction: float = 0.05) -> tuple[Tensor, Tensor]:
    """The text's bytes as two 1-D uint8 tensors: for training, and the end, for validation."""
    raw = stdlib_bytes() if text_file is None else text_file.read_bytes()
    tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    val_size = int(len(tokens) * val_fraction)
    return tokens[: len(tokens) - val_size], tokens[len(tokens) - val_size :]


class Batches:
    """Endless (inputs, targets), both int64 [batch, seq]; targets are the next bytes.

    Windows start at random places, which depend on `seed` alone. `state_dict` says where it is.
    """

    def __init__(self, tokens: Tensor, batch: int, seq: int, seed: int) -> None:
        if len(tokens) <= seq:
            raise ValueError(f"a text of {len(tokens)} bytes is too short for windows of {seq} + 1")
        self.tokens, self.batch, self.seq = tokens, batch, seq
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        places = len(self.tokens) - self.seq
        starts = torch.randint(places, (self.batch, 1), generator=self.generator)
        windows = self.tokens[starts + torch.arange(self.seq + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])
