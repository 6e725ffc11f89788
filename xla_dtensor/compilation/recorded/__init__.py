"""One trace and what came of it: inputs, results, effects, history."""
