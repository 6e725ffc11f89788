"""train.py under Ray Train: `python examples/train_llama/ray_train.py --workers 2 -- --steps 50`.

Ray places the workers and starts them again when one is lost; what they run is train.py.
"""

import argparse
from pathlib import Path

FOLDER = str(Path(__file__).parent.resolve())


def train_loop(config: dict) -> None:
    import sys

    sys.path.insert(0, FOLDER)
    import train

    train.main(config["argv"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="processes, on any machines")
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--tpu", metavar="ACCELERATOR", help="such as TPU-V6E")
    parser.add_argument("--topology", help="of the TPU slice, such as 4x4")
    parser.add_argument("--restarts", type=int, default=3, help="after this many it gives up")
    parser.add_argument("train", nargs="*", help="options of train.py, after --")
    options = parser.parse_args()

    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from xla_dtensor.ecosystem.ray import trainer

    scaling = ScalingConfig(
        num_workers=options.workers,
        use_gpu=options.use_gpu,
        use_tpu=options.tpu is not None,
        accelerator_type=options.tpu,
        topology=options.topology,
    )
    trainer(
        train_loop,
        scaling,
        run_config=RunConfig(failure_config=FailureConfig(max_failures=options.restarts)),
        train_loop_config={"argv": options.train},
    ).fit()


if __name__ == "__main__":
    main()
