"""Keeps the store at which hosts meet: ``python -m xla_dtensor.elastic 29500``.

Without it the host that the endpoint names keeps it, and when that one is lost, so are all.
"""

import argparse
import time

from xla_dtensor.elastic.hosts import keep_store

parser = argparse.ArgumentParser(prog="python -m xla_dtensor.elastic", description=__doc__)
parser.add_argument("port", type=int, help="the port of the endpoint that `run` is given")
arguments = parser.parse_args()
store = keep_store(arguments.port)
print(f"hosts can meet at port {store.port}", flush=True)
while True:
    time.sleep(3600)
