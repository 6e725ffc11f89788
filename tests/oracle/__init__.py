"""The same script under ``torchrun`` and on an xla mesh in one process, compared rank by rank."""
