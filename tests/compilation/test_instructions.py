"""Bytecode as the package reads it is what ``dis`` gives."""

from __future__ import annotations

import argparse
import asyncio.base_events
import dataclasses
import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from xla_dtensor.compilation.code.instructions import instructions

NAMED = {*dis.hasname, *dis.haslocal, *dis.hasfree}
MODULES = (argparse, asyncio.base_events, dataclasses, inspect, torch.nn.functional)


def inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code with that of all functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from inside(constant)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_instructions_are_those_of_dis(module: Any) -> None:
    source = inspect.getsource(module)
    codes = list(inside(compile(source, module.__name__, "exec", dont_inherit=True)))
    assert len(codes) > 50
    for code in codes:
        found = instructions(code)
        expected = list(dis.get_instructions(code))
        assert [i[:3] for i in found] == [(i.opname, i.opcode, i.arg) for i in expected]
        for mine, theirs in zip(found, expected, strict=True):
            has_name = theirs.opcode in NAMED and isinstance(theirs.argval, str)
            if theirs.opname == "KW_NAMES":  # `dis` of Python 3.11 doesn't know them
                assert mine.argval == code.co_consts[mine.arg or 0]
            elif has_name or theirs.opcode in dis.hasconst:
                assert mine.argval == theirs.argval
            else:
                assert mine.argval is None
            assert (mine.argrepr == "[]") == (theirs.argrepr == "[]")


def test_a_name_whose_number_does_not_fit_into_a_byte() -> None:
    text = "; ".join(f"x.a{k}" for k in range(600))
    found = instructions(compile(text, "text", "exec"))
    names = [i.argval for i in found if i.opname == "LOAD_ATTR"]
    assert names == [f"a{k}" for k in range(600)]
