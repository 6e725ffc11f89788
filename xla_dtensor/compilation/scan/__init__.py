"""Equal layers as one loop."""
