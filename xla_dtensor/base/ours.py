"""`is_ours`: whether a value is an xla tensor, in either view.

Here, below the tensor classes, for hooks that are there before the first tensor: the classes wait
for it, and with them JAX. `tensors/of_form.py` has the same function with its type. Which view a
tensor is, ``isinstance(x, XLAShardedTensor)`` says.
"""

from __future__ import annotations

from collections.abc import Callable


class OurTensor:
    """Base of the package's tensor classes, and so of the users' that are shown by ours."""

    __slots__ = ()


class SaysCpu:
    """Base of the package's tensors that say that they are on the CPU, as code has asked for it,
    and aren't yet: they have no memory, and their own ``__torch_dispatch__`` knows what to do."""

    __slots__ = ()


# What `isinstance(value, OurTensor)` does, in one call that isn't Python's.
is_ours: Callable[[object], bool] = OurTensor.__instancecheck__
