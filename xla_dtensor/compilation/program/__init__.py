"""A program: compiled, guarded, launched, written back."""
