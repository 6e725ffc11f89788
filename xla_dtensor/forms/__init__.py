"""How tensors lie in arrays: their physical form, the array behind them, views of it, and what each
device holds of it."""
