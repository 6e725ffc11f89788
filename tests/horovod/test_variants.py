"""The functions that `horovod.api.variants` makes are, from outside, functions written by hand."""

from __future__ import annotations

import inspect
import pickle
import traceback
import typing
import warnings

import pytest
import torch

import xla_dtensor.horovod as hvd
from xla_dtensor.horovod.api import builds, collectives, variants

TABLE = {
    name: value
    for module in (collectives, builds)
    for name, value in vars(module).items()
    if inspect.isfunction(value) and not name.startswith("_") and name in hvd.__all__
}
HANDLES = [name for name in TABLE if "_async" in name]


@pytest.mark.parametrize("name", TABLE)
def test_each_is_found_under_its_own_name(name: str) -> None:
    function = TABLE[name]
    assert function is getattr(hvd, name)
    assert function.__name__ == function.__qualname__ == function.__code__.co_name == name
    assert pickle.loads(pickle.dumps(function)) is function
    assert "return" in typing.get_type_hints(function)
    assert function.__doc__


@pytest.mark.parametrize("name", TABLE)
def test_wrong_arguments_name_the_function(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'x'"):
        TABLE[name](x=1)


@pytest.mark.parametrize("name", HANDLES)
def test_what_is_not_waited_for_is_a_handle(name: str) -> None:
    assert typing.get_type_hints(TABLE[name])["return"] is variants.Handle


def test_a_grouped_one_takes_a_list(ranks: object) -> None:
    for name in (n for n in TABLE if n.startswith("grouped_")):
        with pytest.raises(ValueError, match=f"^{name}: give a list of tensors") as error:
            TABLE[name]([])
        assert name in [frame.name for frame in traceback.extract_tb(error.tb)]


@pytest.mark.parametrize("name", [n for n in TABLE if "allreduce" in n])
def test_the_warning_about_average_is_at_the_callers_line(name: str, ranks: object) -> None:
    x = torch.ones(2, device="xla")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = TABLE[name]([x] if name.startswith("grouped_") else x, average=True)
        if name in HANDLES:
            hvd.synchronize(found)
    assert [w.filename for w in caught] == [__file__]
