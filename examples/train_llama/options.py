"""The command line of train.py."""

import argparse
from pathlib import Path

from model import ModelConfig


def mesh_shape(text: str) -> tuple[int, ...]:
    """ "2x4" -> (2, 4)"""
    try:
        shape = tuple(int(size) for size in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh shape; write it like 2x4 or 8")
    return shape


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level Llama on the Python standard library's sources.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument

    where = parser.add_argument_group("where it runs").add_argument
    where("--mesh", type=mesh_shape, default=(2, 4), help="mesh shape, as 2x4, 8 or 2x2x2")
    where("--reference", action="store_true", help="plain CPU torch, without mesh or XLA")
    where("--eager", action="store_true", help="op by op instead of one compiled program")

    model = parser.add_argument_group("model").add_argument
    model("--dim", type=int, default=128)
    model("--layers", type=int, default=4)
    model("--heads", type=int, default=8)
    model("--kv-heads", type=int, default=4)

    train = parser.add_argument_group("training").add_argument
    train("--batch", type=int, default=8)
    train("--seq", type=int, default=128, help="bytes per window")
    train("--steps", type=int, default=400)
    train("--lr", type=float, default=2e-3, help="peak learning rate")
    train("--warmup", type=int, default=50, help="steps of linear warm-up")
    train("--clip", type=float, default=1.0, help="largest norm of the gradient")
    train("--seed", type=int, default=0)
    train("--text", type=Path, help="train on this file instead of the standard library")

    kept = parser.add_argument_group("checkpoints").add_argument
    kept("--resume", action="store_true", help="go on from the newest checkpoint")
    kept("--checkpoints", type=Path, metavar="FOLDER", help="where they are; by default in --out")
    kept("--save-every", type=int, default=50, metavar="STEPS")
    kept("--export", type=Path, metavar="FOLDER", help="write the weights as safetensors files")

    add("--sample", type=int, default=200, metavar="BYTES", help="length of the final sample")
    add("--temperature", type=float, default=0.7, help="of the sample; 0 takes the likeliest")
    add("--out", type=Path, default=Path(__file__).parent / "out", help="folder of the plot")
    add("--losses", type=Path, metavar="FILE", help="write every step's loss as JSON")
    options = parser.parse_args(argv)
    options.checkpoints = options.checkpoints or options.out / "checkpoints"
    if options.reference and (options.resume or options.export):
        parser.error("--reference keeps no checkpoints: no --resume, no --export")
    if options.dim % (2 * options.heads) or options.heads % options.kv_heads:
        parser.error("--dim must be a multiple of 2 * --heads, --heads one of --kv-heads")
    return options


def model_config(options: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        dim=options.dim,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        max_seq=options.seq,
    )
