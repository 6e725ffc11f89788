"""The cases in processes: each runs in all of them, one after the other."""

from __future__ import annotations

import json
import sys
import traceback

import tests.horovod.cases  # noqa: F401  (registers them)
import xla_dtensor.horovod as hvd
from tests.horovod.ranks import CASES, PROCESSES


def main() -> None:
    hvd.init()
    names = sys.argv[1:] or [name for name, case in CASES.items() if PROCESSES in case.where]
    found = {}
    for name in names:
        try:
            CASES[name].body()
            found[name] = "ok"
        except BaseException:
            found[name] = traceback.format_exc()
            print(name, found[name], flush=True)
        hvd.barrier()
    print("CASES " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
