"""Comparing what a rule says with what XLA does: one `Finding` per call and layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from tools.rule_check.exceptions import ALLOWED
from tools.rule_check.layouts import Claim, claims
from tools.rule_check.programs import compile_call
from tools.rule_check.samples import Sample
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.rules.call import base_name
from xla_dtensor.rules.merging import REPLICATE, Placements, shard_dim

AGREE, LESS, MORE, DIFFERENT, UNNAMED = "agree", "less", "more", "different", "unnamed"


@dataclass(frozen=True)
class Finding:
    """One call in one layout.

    Attributes:
        moves: why the rule expects communication; empty if it expects none.
        exact: whether the rule uses the inputs as they are.
        collectives: what the compiled call has, by kind.
        layouts: per result how the rule's layout compares with the one that XLA would choose: the
            rule keeps ``"less"`` sharded, ``"more"``, something ``"different"``, or they agree.
        error: what compiling raised.
    """

    sample: Sample
    mesh_shape: tuple[int, ...]
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    moves: str
    exact: bool = True
    collectives: Counter[str] = field(default_factory=Counter)
    layouts: tuple[str, ...] = ()
    error: str = ""

    @property
    def rule(self) -> str:
        return self.sample.rule

    @property
    def violation(self) -> str:
        """What is wrong with the rule; empty if nothing is."""
        if self.error:
            return self.error
        if self.collectives and not self.moves:
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.collectives.items()))
            return f"claims no communication, compiles to {kinds}"
        return ""

    @cached_property
    def allowed(self) -> str:
        """The reason for which the violation is accepted; empty if there is none."""
        func = self.sample.func
        allowed = ALLOWED.get(f"{func.namespace}::{base_name(func)}")
        if allowed is None or self.error or (allowed.cut_only and self.exact):
            return ""
        return allowed.reason

    def __str__(self) -> str:
        inputs = ", ".join(map(short, self.inputs))
        outputs = ", ".join(map(short, self.outputs))
        mesh = "x".join(map(str, self.mesh_shape))
        return f"{self.sample} on {mesh}: {inputs} -> {outputs}"


@dataclass
class Checked:
    """The findings of a call, or why there are none."""

    sample: Sample
    findings: list[Finding] = field(default_factory=list)
    reason: str = ""


def check_call(sample: Sample, meshes: Sequence[DeviceMesh], free: int, moving: int) -> Checked:
    """Check one call on each mesh, in up to `free` layouts for which its rule claims that nothing
    is communicated and `moving` others."""
    checked = Checked(sample)
    for mesh in meshes:
        try:
            drawn = claims(sample, tuple(mesh.shape), free, moving)
        except NotImplementedError as error:
            checked.reason = _first_line(error)
            return checked
        except (RuntimeError, ValueError) as error:
            text = f"the rule fails: {_first_line(error)}"
            checked.findings.append(Finding(sample, tuple(mesh.shape), (), (), "", error=text))
            return checked
        for claim in drawn:
            try:
                checked.findings.append(_finding(sample, claim, mesh))
            except (UnsupportedOpError, NotImplementedError) as error:
                checked.reason = _first_line(error)
                return checked
            except (RuntimeError, TypeError, ValueError) as error:
                # The rule is not to blame, and `tests/conformance` has every op's failures.
                checked.reason = f"dispatch fails: {_first_line(error)}"
                return checked
    if not checked.findings:
        checked.reason = "the rule leaves the call to the compiler, or has nothing to shard"
    return checked


def _first_line(error: Exception) -> str:
    """The first sentence or so of a message: what happened, without the way out."""
    return str(error).strip().split("\n")[0].split(". ")[0]


def _finding(sample: Sample, claim: Claim, mesh: DeviceMesh) -> Finding:
    made = Finding(sample, tuple(mesh.shape), claim.inputs, claim.outputs, claim.moves, claim.exact)
    try:
        compiled = compile_call(sample, claim.inputs, mesh)
        chosen = compiled.chosen()
    except jax.errors.JaxRuntimeError as error:
        return replace(made, error=f"XLA fails to compile it: {_first_line(error)}")
    return replace(
        made,
        outputs=tuple(compiled.claimed),
        collectives=compiled.collectives,
        layouts=tuple(map(compare, compiled.claimed, chosen)),
    )


def compare(claimed: Placements, chosen: Placements | None) -> str:
    """How the rule's layout compares with XLA's (which knows no partial values)."""
    if chosen is None:
        return UNNAMED
    ours = tuple(REPLICATE if isinstance(p, Partial) else p for p in claimed)
    if ours == chosen:
        return AGREE
    pairs = list(zip(ours, chosen, strict=True))
    if all(a in (b, REPLICATE) for a, b in pairs):
        return LESS
    if all(b in (a, REPLICATE) for a, b in pairs):
        return MORE
    return DIFFERENT


def short(placements: Placements) -> str:
    """``[S0][R]``: how a report names placements."""
    return "".join(f"[{_short(p)}]" for p in placements)


def _short(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P{placement.reduce_op}"
    strided = f"/{placement.split_factor}" if isinstance(placement, _StridedShard) else ""
    return f"S{shard_dim(placement)}{strided}"
