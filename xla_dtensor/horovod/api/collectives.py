"""The table of Horovod's collectives: which variants each has.

The parameters are in `parameters`; for type checkers, which can't see what `variants` makes of
them, `collectives.pyi` has each function's (``python tools/horovod_names.py --write``).
"""

from xla_dtensor.horovod.api import parameters
from xla_dtensor.horovod.api.variants import (
    ASYNC,
    ASYNC_IN_PLACE,
    GROUPED,
    GROUPED_ASYNC,
    GROUPED_ASYNC_IN_PLACE,
    GROUPED_IN_PLACE,
    IN_PLACE,
    WAITED,
)

allreduce = WAITED.of(parameters.allreduce)
allreduce_async = ASYNC.of(parameters.allreduce)
allreduce_ = IN_PLACE.of(parameters.allreduce)
allreduce_async_ = ASYNC_IN_PLACE.of(parameters.allreduce)
grouped_allreduce = GROUPED.of(parameters.allreduce)
grouped_allreduce_async = GROUPED_ASYNC.of(parameters.allreduce)
grouped_allreduce_ = GROUPED_IN_PLACE.of(parameters.allreduce)
grouped_allreduce_async_ = GROUPED_ASYNC_IN_PLACE.of(parameters.allreduce)

_NO_ADASUM = "HorovodInternalError: `Adasum`."
reducescatter = WAITED.of(parameters.reducescatter)
reducescatter_async = ASYNC.of(parameters.reducescatter, _NO_ADASUM)
grouped_reducescatter = GROUPED.of(parameters.reducescatter)
grouped_reducescatter_async = GROUPED_ASYNC.of(parameters.reducescatter, _NO_ADASUM)

allgather = WAITED.of(parameters.allgather)
allgather_async = ASYNC.of(parameters.allgather)
grouped_allgather = GROUPED.of(parameters.allgather)
grouped_allgather_async = GROUPED_ASYNC.of(parameters.allgather)

broadcast = WAITED.of(parameters.broadcast)
broadcast_async = ASYNC.of(parameters.broadcast)
broadcast_ = IN_PLACE.of(parameters.broadcast)
broadcast_async_ = ASYNC_IN_PLACE.of(parameters.broadcast)

alltoall = WAITED.of(parameters.alltoall)
alltoall_async = ASYNC.of(parameters.alltoall, "ValueError: splits that are no integers.")
