"""What a training run does while it runs: times, speed, memory; profiles by module."""

from xla_dtensor.metrics.measured import Metrics, to
from xla_dtensor.metrics.profile import Profile, profile

__all__ = ["Metrics", "Profile", "profile", "to"]
