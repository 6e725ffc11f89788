"""Other systems' names, for programs that were written for them: `torch_xla`, `hyper_parallel`."""
