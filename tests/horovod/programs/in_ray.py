"""The script of `launched` in two of Ray Train's workers.

python -m tests.horovod.programs.in_ray FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests import ray_training


def train_loop(config: dict[str, Any]) -> None:
    import xla_dtensor.horovod as hvd
    from tests.horovod.programs import elastic, launched

    folder = Path(config["folder"])
    if not (folder / "killed").exists():
        launched.main()
    found = elastic.main(folder, victim=1)
    (folder / f"rank{hvd.rank()}").write_text(f"{found} of {hvd.size()}")


if __name__ == "__main__":
    ray_training.fit(train_loop, sys.argv[1], heartbeat=8)
