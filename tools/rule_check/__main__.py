"""``python -m tools.rule_check``: check the rules, print a table, fail if one is
wrong."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import jax
from torch.distributed.device_mesh import init_device_mesh

from tools.rule_check import (
    Checked,
    Finding,
    Report,
    Sample,
    check_call,
    from_schemas,
    samples,
)
from tools.rule_check.report import LEGEND
from xla_dtensor.runtime import xla_flags


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.rule_check", description=__doc__)
    parser.add_argument("--names", default="", help="ops or rules, comma-separated (default: all)")
    parser.add_argument("--mesh", default="8,2x4", help="mesh shapes (default: 8,2x4)")
    parser.add_argument("--layouts", type=int, default=4, help="per call and mesh (default: 4)")
    parser.add_argument("--json", type=Path, help="write everything found to this file")
    parser.add_argument("--verbose", action="store_true", help="print every layout")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    # Programs are compiled and thrown away: compile them fast, and for simulated devices.
    xla_flags.add(*xla_flags.QUICK_COMPILES)
    shapes = [tuple(map(int, mesh.split("x"))) for mesh in arguments.mesh.split(",")]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(map(math.prod, shapes)))

    names = set(filter(None, arguments.names.split(",")))
    called, made = (_chosen(group, names) for group in (samples(), from_schemas()))
    if not called and not made:
        print(f"no op or rule with a call is named {', '.join(sorted(names))}", file=sys.stderr)
        return 2
    meshes = [init_device_mesh("xla", shape) for shape in shapes]
    # The elementwise ones are many, and all of one rule: fewer layouts of each.
    plan = [(s, arguments.layouts, 1) for s in called]
    plan += [(s, max(2, arguments.layouts // 2), 0) for s in made]
    every = []
    with warnings.catch_warnings():
        # torch's meta kernels warn of their own deprecations.
        warnings.simplefilter("ignore")
        for sample, free, moving in plan:
            if arguments.verbose:
                # Before it is compiled: some of XLA's failures end the process.
                print(sample, flush=True)
            every.append(check_call(sample, meshes, free, moving))
            if arguments.verbose:
                _print_all(every[-1])
    report = Report(every)
    print(f"{report.table()}\n\n{LEGEND}")
    _print("allowed", report.allowed, 1)
    _print("WRONG", report.violations, None)
    if not names:
        for name, reason in report.not_checked().items():
            print(f"not checked: {name}: {reason}")
        for name in report.not_needed():
            print(f"exception that nothing was found for: {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report.json(), indent=1) + "\n")
    print(f"\n{len(report.violations)} wrong, {len(report.allowed)} allowed")
    return 1 if report.violations else 0


def _chosen(calls: Iterable[Sample], names: set[str]) -> list[Sample]:
    return [call for call in calls if not names or names & _names(call)]


def _names(sample: Sample) -> set[str]:
    packet = sample.func._schema.name
    return {packet, packet.split("::")[1], sample.rule, sample.func.name()}


def _print_all(checked: Checked) -> None:
    for finding in checked.findings:
        said = finding.moves or "no communication"
        print(f"  {finding}: {said}; {dict(finding.collectives)} {list(finding.layouts)}")
    if checked.reason:
        print(f"  not checked: {checked.reason}")


def _print(title: str, findings: list[Finding], limit: int | None) -> None:
    for op, found in _by_op(findings).items():
        reason = f": {found[0].allowed}" if found[0].allowed else ""
        print(f"\n{title}: {op}, {len(found)} layouts{reason}")
        for finding in found[:limit]:
            print(f"  {finding} {finding.violation}")


def _by_op(findings: list[Finding]) -> dict[str, list[Finding]]:
    grouped: dict[str, list[Finding]] = {}
    for finding in findings:
        grouped.setdefault(finding.sample.func._schema.name, []).append(finding)
    return grouped


if __name__ == "__main__":
    sys.exit(main())
