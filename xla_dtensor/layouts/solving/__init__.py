"""How one axis cuts a step, as an integer program, and HiGHS to solve it."""
