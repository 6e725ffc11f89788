from collections.abc import Sequence
from typing import Any

from xla_dtensor.horovod.collectives.requests import Handle

def allreduce(
    tensor: Any,
    average: bool | None = ...,
    name: str | None = ...,
    compression: Any = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: Any = ...,
) -> Any: ...
def allreduce_async(
    tensor: Any,
    average: bool | None = ...,
    name: str | None = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: Any = ...,
) -> Handle: ...
def allreduce_(
    tensor: Any,
    average: bool | None = ...,
    name: str | None = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: Any = ...,
) -> Any: ...
def allreduce_async_(
    tensor: Any,
    average: bool | None = ...,
    name: str | None = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: Any = ...,
) -> Handle: ...
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = ...,
    name: str | None = ...,
    compression: Any = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: Any = ...,
) -> list[Any]: ...
def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = ...,
    name: str | None = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: Any = ...,
) -> Handle: ...
def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = ...,
    name: str | None = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: Any = ...,
) -> list[Any]: ...
def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = ...,
    name: str | None = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: Any = ...,
) -> Handle: ...
def reducescatter(
    tensor: Any,
    name: str | None = ...,
    compression: Any = ...,
    op: int = ...,
    process_set: Any = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
) -> Any: ...
def reducescatter_async(
    tensor: Any,
    name: str | None = ...,
    op: int = ...,
    process_set: Any = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
) -> Handle: ...
def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = ...,
    compression: Any = ...,
    op: int = ...,
    process_set: Any = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
) -> list[Any]: ...
def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = ...,
    op: int = ...,
    process_set: Any = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
) -> Handle: ...
def allgather(
    tensor: Any,
    name: str | None = ...,
    process_set: Any = ...,
) -> Any: ...
def allgather_async(
    tensor: Any,
    name: str | None = ...,
    process_set: Any = ...,
) -> Handle: ...
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = ...,
    process_set: Any = ...,
) -> list[Any]: ...
def grouped_allgather_async(
    tensors: Sequence[Any],
    name: str | None = ...,
    process_set: Any = ...,
) -> Handle: ...
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = ...,
    process_set: Any = ...,
) -> Any: ...
def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = ...,
    process_set: Any = ...,
) -> Handle: ...
def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = ...,
    process_set: Any = ...,
) -> Any: ...
def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = ...,
    process_set: Any = ...,
) -> Handle: ...
def alltoall(
    tensor: Any,
    splits: Any = ...,
    name: str | None = ...,
    process_set: Any = ...,
) -> Any: ...
def alltoall_async(
    tensor: Any,
    splits: Any = ...,
    name: str | None = ...,
    process_set: Any = ...,
) -> Handle: ...
