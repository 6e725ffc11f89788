"""How numbers of rows that are values on the devices are taken apart: their tensors of counts."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.numbers.counts import Counts
from xla_dtensor.base.numbers.row_counts import CountNode
from xla_dtensor.compilation.objects.kind import ObjectKind


class _Count(ObjectKind):
    """A number: which entries of which counts it is the sum of."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        node = value.node if isinstance(value, torch.SymInt) else value
        counts = list(dict.fromkeys(counts for counts, _ in node.terms_of))
        terms = tuple((counts.index(c), i, n) for (c, i), n in node.terms_of.items())
        return (type(value), terms, node.constant), counts

    def make(self, data: Any, parts: list[Any]) -> Any:
        cls, terms, constant = data
        node = CountNode({(parts[c], i): n for c, i, n in terms}, constant)
        return torch.SymInt(node) if cls is torch.SymInt else node


class _Counts(ObjectKind):
    """Counts: their tensor, and what is known of sums of entries."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        def own(known: Any) -> Any:
            """What is said of these alone, by their numbers."""
            found = {
                tuple(sorted((i, n) for (_, i), n in terms)): most
                for terms, most in known.items()
                if all(counts is value for (counts, _), _ in terms)
            }
            return tuple(sorted(found.items()))

        return (own(value.exact), own(value.most)), [value.tensor]

    def make(self, data: Any, parts: list[Any]) -> Any:
        made = Counts(parts[0])
        for known, said in zip((made.exact, made.most), data, strict=True):
            for terms, most in said:
                known[frozenset(((made, i), n) for i, n in terms)] = most
        return made


COUNT, COUNTS = _Count(), _Counts()
