"""Which operations round as CPU torch's do: the table of docs/rounding.md.

python -m tools.rounding          # prints it
python -m tools.rounding --write  # into the page
python -m tools.rounding --check  # exits with 1 where one that should doesn't
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import xla_dtensor as xd

PAGE = Path(__file__).parents[1] / "docs" / "rounding.md"
BEGIN, END = "<!-- made by tools/rounding.py --write -->\n", "<!-- end -->"
SIZE = 4096
LARGE = 12582912.0  # 3 * 2**22: adding it to a float32 rounds that to an integer

Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

EXACT: dict[str, Program] = {
    "x + y, x - y, x * y": lambda x, y, z: torch.stack([x + y, x - y, x * y]),
    "x / y": lambda x, y, z: x / y,
    "x / 127.5": lambda x, y, z: x / 127.5,
    "127.5 / x, x.reciprocal()": lambda x, y, z: torch.stack([127.5 / x, x.reciprocal()]),
    "x / y[0]": lambda x, y, z: x / y[0],
    "x / 3 / 7": lambda x, y, z: x / 3 / 7,
    "x / y / z": lambda x, y, z: x / y / z,
    "x / (y / z)": lambda x, y, z: x / (y / z),
    "x / y * y": lambda x, y, z: x / y * y,
    "(x + 12582912) - 12582912": lambda x, y, z: (x + LARGE) - LARGE,
    "x + 0.1 + 0.3": lambda x, y, z: x + 0.1 + 0.3,
    "x * 0.1 * 0.3": lambda x, y, z: x * 0.1 * 0.3,
    "x * 1e30 / 1e30": lambda x, y, z: (x * 1e20) * 1e30 / 1e30,
    "x * y + z": lambda x, y, z: x * y + z,
    "x * x - y * y, of equal numbers": lambda x, y, z: x * x - x.clone() * x.clone(),
    "column * row + column": lambda x, y, z: x[:64, None] * y[:64] + x[:64, None],
    "column / row": lambda x, y, z: x[:64, None] / y[:64],
    "x ** 2 + z, x ** 3 - z": lambda x, y, z: torch.stack([x**2 + z, x**3 - z, x.square() + z]),
    "x - 0.1 * (0.9 * y + z)": lambda x, y, z: x - 0.1 * (0.9 * y + z),
    "torch.add(x, y, alpha=0.3)": lambda x, y, z: torch.add(x, y, alpha=0.3),
    "addcmul, addcdiv, lerp": lambda x, y, z: torch.stack(
        [torch.addcmul(x, y, z, value=0.3), torch.addcdiv(x, y, z, value=0.3), x.lerp(y, 0.3)]
    ),
    "x % 0.3, fmod": lambda x, y, z: torch.stack([x % 0.3, torch.fmod(x, 0.3)]),
    "floor_divide, div(rounding_mode=)": lambda x, y, z: torch.stack(
        [x // 0.3, torch.div(x, y, rounding_mode="floor"), torch.div(x, y, rounding_mode="trunc")]
    ),
    "div(k * 0.7, 0.7, rounding_mode='trunc')": lambda x, y, z: torch.div(
        x.round() * 0.7, 0.7, rounding_mode="trunc"
    ),
    "round, floor, ceil, trunc, frac": lambda x, y, z: torch.stack(
        [(x / 0.1).round(), x.floor(), x.ceil(), x.trunc(), x.frac()]
    ),
    "comparisons, where, clamp": lambda x, y, z: torch.where(x < y, x, z).clamp(-1, 1),
    "x ** 2, x ** 3": lambda x, y, z: torch.stack([x**2, x**3]),
    "x.int() / 7": lambda x, y, z: x.int() / 7,
    "to int8, int32, int64": lambda x, y, z: x.to(torch.int8).int() + x.int() + x.long(),
    "to bfloat16 and back, / 3": lambda x, y, z: x.bfloat16().float() / 3,
    "float16: x * y, x / 3": lambda x, y, z: (x.half() * y.half()).float() + (x.half() / 3).float(),
    "bfloat16: x + 0.1, add(x, y, alpha=0.1)": lambda x, y, z: torch.stack(
        [x.bfloat16() + 0.1, 0.1 - x.bfloat16(), x.bfloat16().add(y.bfloat16(), alpha=0.1)]
    ),
    "float64: x / 3 * y + z": lambda x, y, z: x.double() / 3 * y.double() + z.double(),
}
"""What is equal to the bit, eagerly and compiled."""

OTHERS: dict[str, Program] = {
    "sqrt": lambda x, y, z: x.abs().sqrt(),
    "rsqrt": lambda x, y, z: x.abs().rsqrt(),
    "exp": lambda x, y, z: (x / 8).exp(),
    "log": lambda x, y, z: x.abs().log(),
    "sin": lambda x, y, z: x.sin(),
    "tanh": lambda x, y, z: x.tanh(),
    "sigmoid": lambda x, y, z: x.sigmoid(),
    "erf": lambda x, y, z: (x / 8).erf(),
    "pow": lambda x, y, z: x.abs() ** (y / 8),
    "hypot": lambda x, y, z: torch.hypot(x, y),
    "gelu": lambda x, y, z: torch.nn.functional.gelu(x),
    "silu": lambda x, y, z: torch.nn.functional.silu(x),
    "softmax of 64": lambda x, y, z: x.view(-1, 64).softmax(1),
    "sum of 64": lambda x, y, z: x.view(-1, 64).sum(1),
    "mean of 64": lambda x, y, z: x.view(-1, 64).mean(1),
    "layer_norm of 64": lambda x, y, z: torch.nn.functional.layer_norm(x.view(-1, 64), (64,)),
    "product of 64 x 64": lambda x, y, z: x.view(64, 64) @ y.view(64, 64),
}
"""What isn't: functions of a library's, and sums, whose order is nobody's promise."""


def measure(program: Program, compiled: bool) -> tuple[int, int, float]:
    """How many elements differ, of how many, and by how much at most, in units of the last place
    (of results that are less than a thousandth of the largest one: of that thousandth)."""
    torch.manual_seed(0)
    given = [torch.randn(SIZE) * 10 for _ in range(3)]
    expected = program(*given)
    run = xd.compile(program) if compiled else program
    for _ in range(3):  # from the second time on, operations are launched together
        found = run(*(x.to("xla") for x in given)).cpu()
    assert found.dtype == expected.dtype
    differs = (found != expected) & ~(found.isnan() & expected.isnan())
    if not expected.is_floating_point():
        return int(differs.sum()), expected.numel(), 0.0
    size = expected.double().abs()
    unit = torch.finfo(expected.dtype).eps * 2.0 ** size.maximum(size.max() / 1000).log2().floor()
    off = ((found.double() - expected.double()).abs() / unit)[differs]
    return int(differs.sum()), expected.numel(), float(off.max()) if len(off) else 0.0


def rows(programs: dict[str, Program]) -> list[str]:
    """The table's."""
    found = []
    for name, program in programs.items():
        cells = []
        for compiled in (False, True):
            count, of, most = measure(program, compiled)
            share = f"{100 * count / of:.0f} %" if count * 100 >= of else f"{count} of {of}"
            cells.append(f"{share}, at most {most:.3g}" if count else "equal")
        found.append(f"| `{name}` | {cells[0]} | {cells[1]} |\n")
    return found


def main() -> int:
    """1 where an operation of `EXACT` isn't, if that is asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        wrong = [row for row in rows(EXACT) if row.count("equal") < 2]
        print("".join(wrong), end="")
        return bool(wrong)
    head = "| | eagerly | compiled |\n|---|---|---|\n"
    table = head + "".join([*rows(EXACT), *rows(OTHERS)])
    if not options.write:
        print(table)
        return 0
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
