"""torchtitan's trainer and models."""
