"""torch's functional collectives with groups of xla meshes.

They ask a registry of process groups for a group's name and size, which knows nothing of meshes
without process groups. Checked on torch 2.13.
"""

from __future__ import annotations

from typing import Any

from xla_dtensor.base import torch_private
from xla_dtensor.integration.patching.take_over import seen_through, take_over


def install() -> None:
    """Let the functions that name groups know those of xla meshes."""
    from xla_dtensor.mesh.group import resolve_group

    collectives = torch_private.functional_collectives
    for name in ("resolve_group", "resolve_group_name"):
        original = torch_private.find(name)
        if original is not None:
            torch_private.replace(name, _first(resolve_group, original))
    size = torch_private.group_size_by_name

    def group_size(group: Any) -> int:
        found = resolve_group(group)
        return size(group) if found is None else found.size()

    torch_private.replace("group_size_by_name", seen_through(group_size, size))
    group_name = torch_private.find("process_group_name")
    if group_name is not None:
        take_over(group_name, _name)
    permute = collectives.permute_tensor

    def permute_tensor(self: Any, src_dst: list[int], group: Any, tag: str = "") -> Any:
        found = resolve_group(group)
        if found is None:
            return permute(self, src_dst, group, tag)
        from xla_dtensor.movement.collectives import permute as xla_permute

        return xla_permute(self, found, src_dst)

    collectives.permute_tensor = seen_through(permute_tensor, permute)


def _name(original: Any, args: Any, kwargs: Any) -> Any:
    """A group's name, by which custom operators are told a group."""
    group = args[0] if args else kwargs["pg"]
    return str(group) if getattr(group, "device_type", None) == "xla" else original(*args, **kwargs)


def _first(ours: Any, original: Any) -> Any:
    def resolve(group: Any, tag: str = "") -> Any:
        found = ours(group)
        return original(group, tag) if found is None else found

    return seen_through(resolve, original)
