"""Lets C see that a tensor is no sequence, though its class has ``__getitem__``.

C asks a class for the function behind its slot ``sq_item``. torch's own tensors have none, and
``torch.tensor([x[0], 2.0])`` takes them for numbers; of a class with a ``__getitem__`` in Python
CPython fills that slot, too, so that torch would ask a 0-d tensor for its length.
"""

from __future__ import annotations

import ctypes


class _SequenceMethods(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("length", "concat", "repeat", "item"))


class _Type(ctypes.Structure):
    # CPython's PyTypeObject up to the field that is needed: the same from 3.8 to 3.14.
    _fields_ = (
        ("head", ctypes.c_byte * object.__basicsize__),
        ("size", ctypes.c_ssize_t),
        ("name", ctypes.c_char_p),
        ("sizes", ctypes.c_ssize_t * 2),
        ("functions", ctypes.c_void_p * 7),
        ("as_sequence", ctypes.POINTER(_SequenceMethods)),
    )


_is_sequence = ctypes.pythonapi.PySequence_Check
_is_sequence.argtypes = [ctypes.py_object]


def not_a_sequence(cls: type) -> None:
    """Take a class's ``sq_item`` away: ``x[i]``, ``len`` and ``iter`` have slots of their own.

    Args:
        cls: written in Python. Its subclasses have the slot again, as it has itself once somebody
            assigns a ``__getitem__`` to it.
    """
    if _KNOWN:
        _Type.from_address(id(cls)).as_sequence.contents.item = None


def _known() -> bool:
    """Whether this interpreter lays classes out as `_Type` says."""

    class Probe:
        def __getitem__(self, index: object) -> object:
            return index

        def __len__(self) -> int:
            return 1

    methods = _Type.from_address(id(Probe))
    if methods.name != b"Probe" or not methods.as_sequence:
        return False
    items = methods.as_sequence.contents
    if not (items.length and items.item) or items.concat or items.repeat:
        return False
    before = _is_sequence(Probe())
    items.item = None
    return bool(before) and not _is_sequence(Probe()) and Probe()[2] == 2


_KNOWN = _known()
