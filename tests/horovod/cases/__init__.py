"""Horovod's torch tests, written anew from what they are about; importing it registers them."""

from tests.horovod.cases import (  # noqa: F401
    adasum,
    allgathers,
    allreduces,
    alltoalls,
    broadcasts,
    joins,
    lifecycle,
    objects,
    optimizers,
    reducescatters,
    sparse,
)
