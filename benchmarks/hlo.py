"""What a compiled XLA program moves between devices, read from its text."""

import re
from collections import Counter
from dataclasses import dataclass

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# "%name = f32[8,128]{1,0} all-gather(...", or, of several arrays, "= (f32[8]{0}, f32[]) all-...(".
_INSTRUCTION = re.compile(
    rf"^\s*(?:ROOT )?\S+ = (?P<type>.*?) (?P<op>{'|'.join(COLLECTIVES)})(?P<start>-start)?\(",
    re.MULTILINE,
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<dims>[\d,]*)\]")


@dataclass(frozen=True)
class Traffic:
    """Per device and per run of the program."""

    counts: dict[str, int]
    bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


def _array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    elements = 1
    for size in filter(None, dims.split(",")):
        elements *= int(size)
    return elements * bits // 8


def collective_traffic(hlo_text: str) -> Traffic:
    """Counts and result bytes of the collectives in an optimized program's `as_text()`.

    A collective in a loop's body is counted once.
    """
    counts: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for match in _INSTRUCTION.finditer(hlo_text):
        op = match["op"]
        arrays = [_array_bytes(a["dtype"], a["dims"]) for a in _ARRAY.finditer(match["type"])]
        if match["start"] and op != "all-reduce":
            # The async forms return (operands, results, context...) where the plain form and
            # all-reduce-start return the results; context is one or two scalars.
            if op == "collective-permute":
                arrays = arrays[1:2]
            else:
                arrays = arrays[len(arrays) // 2 :]
        counts[op] += 1
        moved[op] += sum(arrays)
    return Traffic(dict(counts), dict(moved))
