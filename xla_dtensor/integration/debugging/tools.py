"""torch's tools for tensors on a mesh: tables of shards, seeds, ``assert_close``, messages."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch

from xla_dtensor.base import torch_private
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over


def install() -> None:
    """When their modules are imported. Read in torch 2.11, checked on 2.13."""
    on_import(torch_private.DTENSOR_RANDOM, _hook_random)
    on_import(torch_private.VISUALIZE_SHARDING, _hook_visualize)
    on_import(torch_private.COMPARISON, _hook_comparison)
    on_import(torch_private.DYNAMO_RULES, lambda module: module.add("xla_dtensor"))
    on_import(torch_private.DYNAMO_VARIABLES, _hook_dynamo)


def _hook_dynamo(module: Any) -> None:
    """``torch.compile`` would look for a graph in our dispatch; it says what to use instead."""
    take_over(module.VariableBuilder.__call__, _refuse_tensor)


def _refuse_tensor(original: Any, args: Any, kwargs: Any) -> Any:
    value = args[1] if len(args) > 1 else kwargs["value"]
    if hasattr(type(value), "_form"):
        raise UnsupportedOpError(
            f"torch.compile of code that uses a tensor of shape {list(value.shape)} on "
            f"{value.device}: XLA is the compiler of xla tensors, by xla_dtensor.compile(function)"
        )
    return original(*args, **kwargs)


def _hook_random(module: Any) -> None:
    take_over(module.manual_seed, _manual_seed)


def _manual_seed(original: Any, args: Any, kwargs: Any) -> Any:
    """Seed the generators, as torch's does in the end. It asks for the mesh's coordinate before."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if getattr(given["device_mesh"], "device_type", None) != "xla":
        return original(*args, **kwargs)
    torch.manual_seed(given["seed"])
    return None


def _hook_visualize(module: Any) -> None:
    take_over(module.visualize_sharding, _visualize)


def _visualize(original: Any, args: Any, kwargs: Any) -> Any:
    """Print the table. torch's rank at coordinate 0 prints it, which the process is."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    tensor = given["dtensor"]
    if getattr(getattr(tensor, "device_mesh", None), "device_type", None) != "xla":
        return original(*args, **kwargs)
    from xla_dtensor.debug.sharding import rectangles, sharding_text

    if tensor.numel() == 0:  # as torch
        return None
    can = all(importlib.util.find_spec(name) for name in ("rich", "matplotlib"))
    if given.get("use_rich") and can and 1 <= tensor.ndim <= 2:
        torch_private.create_rich_table(tensor.shape, rectangles(tensor), device_kind="xla")
    else:
        print(sharding_text(tensor))
    return None


def _hook_comparison(module: Any) -> None:
    unwrap = torch_private.find("unwrap_for_comparison")
    if unwrap is not None:  # newer versions of torch ask it
        take_over(unwrap, _unwrap)


def _unwrap(original: Any, args: Any, kwargs: Any) -> Any:
    """What ``assert_close`` compares: on the host, where it counts what differs. Of the checks that
    both are sharded alike nothing changes."""
    actual, expected = args
    local = original(actual, expected, **kwargs)
    if not (hasattr(actual, "_form") and hasattr(expected, "_form")):
        return local  # one of another device, which is a difference
    return tuple(_on_host(*pair) for pair in zip(args, local, strict=True))


def _on_host(tensor: Any, local: Any) -> Any:
    if tensor.is_meta:
        return local
    with torch.no_grad():
        if local is not tensor:
            return tensor.full_tensor().cpu()
        return torch.stack(tensor.local_values()) if tensor.varying else tensor.cpu()
