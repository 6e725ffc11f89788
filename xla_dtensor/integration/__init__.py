"""Every hook into torch; nothing outside this package patches it."""

from xla_dtensor.integration.hooks import install

__all__ = ["install"]
