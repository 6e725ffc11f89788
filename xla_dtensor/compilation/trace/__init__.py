"""While a step's Python runs on tracers: what dispatch, optimizers and modules tell the trace."""
