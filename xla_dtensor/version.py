"""The version of the package, here and nowhere else."""

VERSION = "0.1.0"
