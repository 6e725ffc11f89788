"""Checkpoints on the command line, without devices: ``python -m xla_dtensor.checkpoint --help``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xla_dtensor.checkpoint.offline import (
    FORMATS,
    Checkpoint,
    convert,
    open_checkpoint,
    verify_checkpoint,
)
from xla_dtensor.checkpoint.safetensors import bytes_of_size
from xla_dtensor.errors import CheckpointError


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says.

    Returns:
        the exit status: 1 if a checkpoint is damaged or can't be read.
    """
    options = _parser().parse_args(arguments)
    try:
        found = open_checkpoint(options.path)
        if options.command == "inspect":
            print(json.dumps(_described(found), indent=1) if options.json else _table(found))
        elif options.command == "verify":
            verify_checkpoint(found, print)
        else:
            left_out = convert(
                found,
                options.target,
                options.to or _format_of(options.target),
                options.only,
                options.add,
                bytes_of_size(options.max_shard_size),
            )
            if left_out:
                print(f"left out, as they are no tensors: {', '.join(left_out)}")
    except (CheckpointError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xla_dtensor.checkpoint",
        description="Checkpoints of CheckpointManager, torch.distributed.checkpoint, safetensors "
        "and torch.save, without devices. Nothing is unpickled but plain data.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="tensors, shapes, layouts, sizes, checksums")
    inspect.add_argument("--json", action="store_true")
    verify = commands.add_parser("verify", help="read all of it and compare the checksums")
    change = commands.add_parser("convert", help="make one of another format")
    for command in (inspect, verify, change):
        command.add_argument("path", type=Path, help="a file, a folder, or that of a manager")
    change.add_argument("target", type=Path, help="a folder, or for torch a file (.pt, .pth, .bin)")
    change.add_argument("--to", choices=FORMATS, help="by default as the target's name says")
    change.add_argument("--only", default="", metavar="PREFIX", help="entries named so, without it")
    change.add_argument("--add", default="", metavar="PREFIX", help="what their names begin with")
    change.add_argument("--max-shard-size", default="5GB", help="of a safetensors file")
    return parser


def _format_of(target: Path) -> str:
    if target.suffix in (".pt", ".pth", ".bin"):
        return "torch"
    raise CheckpointError(f"{target}: say of which format it is to be: --to dcp, --to safetensors")


def _described(found: Checkpoint) -> dict[str, Any]:
    checksums = {} if found.manifest is None else found.manifest.files
    return {
        "path": str(found.path),
        "format": found.format,
        "step": None if found.manifest is None else found.manifest.step,
        "about": {} if found.manifest is None else found.manifest.about,
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.sizes),
                "bytes": tensor.nbytes,
                "layout": tensor.layout,
            }
            for name, tensor in found.tensors.items()
        },
        "others": list(found.others),
        "files": {
            file.name: {
                "bytes": file.stat().st_size,
                "crc32": f"{checksums[file.name][1]:08x}" if file.name in checksums else None,
            }
            for file in found.files
        },
    }


def _table(found: Checkpoint) -> str:
    about = _described(found)
    step = "" if about["step"] is None else f", step {about['step']}"
    rows = [
        (name, t["dtype"], str(t["shape"]), f"{t['bytes']:,}", t["layout"])
        for name, t in about["tensors"].items()
    ]
    total = sum(t["bytes"] for t in about["tensors"].values())
    lines = [f"{about['path']}: {about['format']}{step}"]
    lines += [f"  {key}: {value}" for key, value in about["about"].items()]
    lines += [f"{len(rows)} tensors, {total:,} bytes", *_aligned(rows)]
    if about["others"]:
        lines += [f"{len(about['others'])} other entries: {', '.join(about['others'])}"]
    files = [(n, f"{f['bytes']:,}", f["crc32"] or "no checksum") for n, f in about["files"].items()]
    return "\n".join([*lines, f"{len(files)} files", *_aligned(files)])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
