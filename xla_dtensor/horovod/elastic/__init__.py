"""Horovod's elastic training: it goes on from the last commit when processes come and go."""

from xla_dtensor.horovod.elastic.running import run
from xla_dtensor.horovod.elastic.sampler import ElasticSampler
from xla_dtensor.horovod.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
