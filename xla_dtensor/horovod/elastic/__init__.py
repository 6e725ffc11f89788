"""Training that goes on when processes come and go: `horovod.torch.elastic`."""

from xla_dtensor.horovod.elastic.running import run
from xla_dtensor.horovod.elastic.sampler import ElasticSampler
from xla_dtensor.horovod.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
