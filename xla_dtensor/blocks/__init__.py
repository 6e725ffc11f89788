"""Programs whose results have the same bits on any mesh: sums in a fixed order of blocks."""

from xla_dtensor.blocks.walk import in_blocks

__all__ = ["in_blocks"]
