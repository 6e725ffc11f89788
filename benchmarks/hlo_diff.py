"""What differs between the compiled torch step and the hand-written JAX step of a model.

    python benchmarks/hlo_diff.py --model moe   # --all: every kind of instruction; --json: the sums

Collectives by kind and result, with where they come from; then the instructions of which one
program has more. Neither step is run.
"""

import argparse
import json
import re
import textwrap
from collections import Counter, defaultdict

import jax
from hlo import KINDS, collective_traffic
from step_vs_jax import SIDES
from steps import NAMES, load

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(?:%?\S+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w-]+)\(", re.M)
_NAME = re.compile(r'op_name="([^"]*)"')
_LAYOUT = re.compile(r"\{[^}]*\}")


def collectives(text: str) -> dict[tuple[str, str], list[str]]:
    """Where the collectives of each kind and result come from."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match and match["op"].removesuffix("-start") in KINDS:
            name = _NAME.search(line)
            result = _LAYOUT.sub("", match["type"])
            found[match["op"], result].append(name[1] if name else "?")
    return found


def instructions(text: str) -> Counter[str]:
    return Counter(match["op"] for match in _INSTRUCTION.finditer(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=NAMES, default=NAMES[0])
    parser.add_argument("--all", action="store_true", help="instructions that are as many, too")
    parser.add_argument("--json", action="store_true", help="what each side moves, as JSON")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    case = load(options.model)
    batches = case.make_batches(2)
    texts = {}
    for name, side in SIDES.items():
        made = side(case, batches)
        if name == "torch":  # a program of a step that has been called; JAX's is compiled aside
            for i in range(2):
                made.step(i)
        texts[name] = made.program().as_text()
    traffic = {name: collective_traffic(text) for name, text in texts.items()}
    if options.json:
        sums = {
            name: {"bytes": moved.total_bytes, "counts": dict(sorted(moved.counts.items()))}
            for name, moved in traffic.items()
        }
        print(json.dumps(sums))
        return
    for name, moved in traffic.items():
        print(f"{name}: {moved.total_bytes / 2**20:.2f} MiB, {moved.counts}")
    found = {name: collectives(text) for name, text in texts.items()}
    for key in sorted({*found["torch"], *found["jax"]}):
        ours, theirs = found["torch"].get(key, []), found["jax"].get(key, [])
        if len(ours) != len(theirs):
            print(f"\n{key[0]} {key[1]}: torch {len(ours)}, jax {len(theirs)}")
            for of, names in (("torch", ours), ("jax", theirs)):
                for what, count in Counter(names).items():
                    print(textwrap.shorten(f"  {of} {count} x {what}", 200))
    counts = {name: instructions(text) for name, text in texts.items()}
    print()
    for op in sorted({*counts["torch"], *counts["jax"]}):
        in_torch, in_jax = counts["torch"][op], counts["jax"][op]
        if options.all or in_torch != in_jax:
            print(f"{op:28} torch {in_torch:6} jax {in_jax:6}")


if __name__ == "__main__":
    main()
