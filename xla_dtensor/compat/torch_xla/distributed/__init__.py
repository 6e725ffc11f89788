"""``torch_xla.distributed``."""
