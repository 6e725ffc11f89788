"""A compiled program of a step: its guards, its inputs, its launch, and what is written back."""
