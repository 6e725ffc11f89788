"""Every entry of torch's ``op_db``, on sharded tensors, compared with CPU torch."""
