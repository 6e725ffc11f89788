"""Symbolic numbers: Python numbers that are inputs of a program, while a step is traced."""
