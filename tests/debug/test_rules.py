"""`debug.rules()`: what is registered."""

from __future__ import annotations

import re
from pathlib import Path

import xla_dtensor as xd

HERE = Path(__file__).name


def test_the_librarys_own():
    by_name = {each.name: each for each in xd.debug.rules()}
    mm = by_name["aten::mm"]
    assert (mm.kind, mm.text, mm.where) == ("family", "m k, k n -> m n", "matmul")
    assert by_name["aten::_softmax"].where == "norm"
    assert len(by_name) > 400


def test_a_part_of_the_name():
    found = xd.debug.rules("softmax")
    assert len(found) == len(list(found)) > 1
    assert all("softmax" in each.name for each in found)
    assert len(xd.debug.rules("no op has this name")) == 0


def test_the_users(scratch, own_ops):
    xd.register_rule("aten::mm", "m! k, k n -> m! n", override=True)
    xd.DistributedOp("mm.of.mine", rule="b h -> b h")
    mine = {each.name: each for each in xd.debug.rules("mm") if each.kind != "family"}
    assert (mine["aten::mm"].kind, mine["aten::mm"].text) == ("user", "m! k, k n -> m! n")
    assert (mine["mm.of.mine"].kind, mine["mm.of.mine"].text) == ("DFunction", "b h -> b h")
    assert all(re.search(rf"{HERE}:\d+$", each.where) for each in mine.values())


def test_the_table(scratch):
    xd.register_rule("aten::mm", "m! k, k n -> m! n", override=True)
    head, *lines = str(xd.debug.rules("aten::mm")).splitlines()
    assert head.split() == ["name", "kind", "rule", "where"]
    assert re.match(rf"aten::mm +user +m! k, k n -> m! n +\S*{HERE}:\d+$", lines[0])
    assert any("elementwise" in line and "foreach" not in line for line in lines)
