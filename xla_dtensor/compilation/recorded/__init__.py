"""One trace of a step, and all that is recorded of it: inputs, results, effects, gradients."""
