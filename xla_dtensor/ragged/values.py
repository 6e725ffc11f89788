"""Numbers of rows as tensors on the devices, and which rows of a buffer they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.base.numbers.counts import Counts
from xla_dtensor.base.numbers.row_counts import CountNode, is_count
from xla_dtensor.execution.value_checks import assert_true


def node_of(number: Any) -> CountNode:
    """The node of a number of rows; of an int, one without entries."""
    return number.node if is_count(number) else CountNode({}, int(number))


def number_of(node: CountNode) -> Any:
    """A node as a number: an int where it is known."""
    exact = node.exact()
    return torch.SymInt(node) if exact is None else exact


def vector(numbers: Sequence[Any], device: Any = "xla") -> Any:
    """Numbers of rows as an int64 tensor on the devices."""
    nodes = [node_of(number) for number in numbers]
    whole = _entries_of_one(nodes)
    if whole is not None:
        return whole.tensor
    total: Any = torch.tensor([node.constant for node in nodes], device=device)
    for counts in {counts: None for node in nodes for counts, _ in node.terms_of}:
        weights = [
            [node.terms_of.get((counts, i), 0) for i in range(len(counts.tensor))] for node in nodes
        ]
        total = total + (torch.tensor(weights, device=device) * counts.tensor).sum(1)
    return total


def _entries_of_one(nodes: Sequence[CountNode]) -> Counts | None:
    """The counts whose entries these are, all of them and in order."""
    first = next((counts for node in nodes for counts, _ in node.terms_of), None)
    if first is None or len(nodes) != len(first.tensor):
        return None
    own = all(n.terms_of == {(first, i): 1} and not n.constant for i, n in enumerate(nodes))
    return first if own else None


def scalar(number: Any) -> Any:
    """A number of rows as an int64 tensor without dims."""
    return vector([number])[0]


def valid(rows: Any, bound: int, ndim: int = 1, dim: int = 0) -> Any:
    """Which of ``bound`` rows are the first ``rows``: a mask that broadcasts over the others of
    ``ndim`` dims."""
    mask = torch.arange(bound, device="xla") < scalar(rows)
    return mask.view([-1 if i == dim else 1 for i in range(ndim)])


def check(holds: Any, message: str) -> None:
    """Assert it on the devices: eagerly at once, and after a compiled step's call."""
    assert_true(holds.all(), message)


def check_lengths(numbers: Sequence[Any], what: str) -> None:
    """Assert that none of them is negative, as torch does of sizes; of each once.

    Raises:
        RuntimeError: one is, and that is known.
    """
    unknown = []
    for node in map(node_of, numbers):
        exact = node.exact()
        if exact is not None and exact < 0:
            raise RuntimeError(f"{what}: a size is negative ({exact})")
        if exact is None and not any(node.key in counts.lengths for counts, _ in node.terms_of):
            unknown.append(node)
    if unknown:
        check(vector([number_of(n) for n in unknown]) >= 0, f"{what}: a size is negative")
    for node in unknown:
        for counts in {counts for counts, _ in node.terms_of}:
            counts.lengths.add(node.key)


def check_most(node: CountNode, most: int) -> None:
    """Assert that a number is at most so much (``torch._check(n <= 64)``)."""
    check(scalar(torch.SymInt(node)) <= most, f"a number of rows is above {most}, its bound")


def shown(node: CountNode) -> str:
    """What each device has, as a text."""
    counts = vector([torch.SymInt(node)])
    values = counts.local_values() if counts._form.varying else [counts.cpu()]
    return f"<{', '.join(str(int(value)) for value in values)}>"
