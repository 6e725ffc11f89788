"""`torch.cond`, `while_loop`, `scan` and `map` on xla tensors."""
