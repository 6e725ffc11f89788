"""The trace of a step while its Python runs: numbers, optimizers, hooks, captured tensors."""
