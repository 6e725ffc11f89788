"""``torch_xla.experimental``."""
