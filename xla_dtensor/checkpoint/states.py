"""Turns the objects of a training run (modules, optimizers, ...) into one state dict, and back.

Saved is what ``torch.distributed.checkpoint`` saves of these objects by torch's own helpers (a
torch program can load it), and beside it, in one entry, the structure: which values that are no
tensors each object's state has, and which kind of tensor is where. torch loads into what is there
already, and an optimizer that hasn't taken a step has no state yet.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.optim import Optimizer

from xla_dtensor.base.torch_private import get_fqns
from xla_dtensor.base.torch_private.attributes import cpp_address
from xla_dtensor.checkpoint import stand_ins
from xla_dtensor.checkpoint.tensor_kinds import Kind, fits, kind_of, like_saved, size_of
from xla_dtensor.errors import CheckpointError
from xla_dtensor.tensors.of_form import is_ours

STRUCTURE = "xla_dtensor"
"""The name of the entry with the structure."""

_MARK = "xla_dtensor.tensor"

Path = tuple[Any, ...]
Described = tuple[torch.dtype, tuple[int, ...]]


class States:
    """The objects of a training run.

    Args:
        objects: by name: modules, optimizers, mappings, ``torch.Generator``s, and what has
            ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: an object is none of these.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.objects = dict(objects)
        for name, thing in self.objects.items():
            known = isinstance(thing, nn.Module | Optimizer | MutableMapping | torch.Generator)
            if not known and not all(hasattr(thing, m) for m in ("state_dict", "load_state_dict")):
                raise TypeError(
                    f"a checkpoint of {name!r}, a {type(thing).__name__}: it has no state_dict() "
                    "and load_state_dict(state); give a dict for plain values"
                )
            if not name or "." in name or name == STRUCTURE:
                raise ValueError(f"a checkpoint of an object named {name!r}: give another name")

    def captured(self) -> tuple[dict[str, Any], dict[str, Kind]]:
        """The state to be saved, with the objects' own tensors in it, and the kinds of these by the
        names that they have in the checkpoint.

        Raises:
            CheckpointError: an object's state has what is neither tensor nor plain data.
        """
        state: dict[str, Any] = {}
        structure: dict[str, Any] = {}
        kinds: dict[str, Kind] = {}
        for name, thing in self.objects.items():
            own = self._state_of(name, thing)
            structure[name] = _marked(own, (name,), kinds)
            _check_plain(structure[name], name)
            state[name] = _without_tuples(own)
        buffer = io.BytesIO()
        torch.save(structure, buffer)
        state[STRUCTURE] = buffer.getvalue()
        return state, kinds

    def targets(
        self, structure: dict[str, Any], stored: Mapping[str, Described]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What to load into: the states with tensors in place of the marks, and these by name.

        Args:
            structure: what `captured` has saved.
            stored: the dtypes and sizes of the tensors that are in the checkpoint.

        Raises:
            CheckpointError: the checkpoint is of other objects, or of others than these.
        """
        _check_stored(structure, stored)
        missing = [name for name in self.objects if name not in structure]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no {', '.join(map(repr, missing))}; it has "
                f"{', '.join(map(repr, structure))}"
            )
        targets: dict[str, torch.Tensor] = {}
        states = {}
        for name, thing in self.objects.items():
            own = self._state_of(name, thing)
            if isinstance(thing, nn.Module):
                _check_same(name, structure[name], own)
            likes = self._likes(thing)
            use = _own_or_none if not isinstance(thing, nn.Module) else _own_of_module
            states[name] = _filled(structure[name], (name,), own, likes, use, targets)
        return states, targets

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give the objects the states that `targets` has made, once they are loaded."""
        for name, thing in self.objects.items():
            state = states[name]
            if isinstance(thing, nn.Module):
                _restore_module(thing, state)
            elif isinstance(thing, Optimizer):
                self._restore_optimizer(name, thing, state)
            elif isinstance(thing, torch.Generator):
                thing.set_state(state["state"])
            elif hasattr(thing, "load_state_dict"):
                thing.load_state_dict(state)
            else:
                thing.clear()
                thing.update(state)

    def _state_of(self, name: str, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return torch_state_dict.get_model_state_dict(thing)
        if isinstance(thing, Optimizer):
            return self._optimizer_state(name, thing)
        if isinstance(thing, torch.Generator):
            return {"state": thing.get_state()}
        return thing.state_dict() if hasattr(thing, "state_dict") else dict(thing)

    # Not torch's `get_optimizer_state_dict`: of an optimizer without a state it takes a step first,
    # which counts, and it wants all parameters to have a state.

    def _optimizer_state(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        """Its state by the names of the parameters, as torch's helper has it; by numbers if no
        module has them all."""
        state = optimizer.state_dict()
        names = self._names_of_parameters(optimizer)
        if names is None:
            return state
        groups = [
            {**group, "params": [names[i] for i in group["params"]]}
            for group in state["param_groups"]
        ]
        return {
            **state,
            "state": {names[i]: values for i, values in state["state"].items()},
            "param_groups": groups,
        }

    def _names_of_parameters(self, optimizer: Optimizer) -> list[str] | None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for thing in self.objects.values():
            if isinstance(thing, nn.Module):
                names = {id(p): next(iter(fqns)) for p, fqns in _named_parameters(thing)}
                if all(id(p) in names for p in parameters):
                    return [names[id(p)] for p in parameters]
        return None

    def _likes(self, thing: Any) -> dict[Any, torch.Tensor]:
        """Of an optimizer the parameters by the keys of its state."""
        if not isinstance(thing, Optimizer):
            return {}
        parameters = [p for group in thing.param_groups for p in group["params"]]
        names = self._names_of_parameters(thing)
        keys: Any = range(len(parameters)) if names is None else names
        return dict(zip(keys, parameters, strict=True))

    def _restore_optimizer(self, name: str, optimizer: Optimizer, state: dict[str, Any]) -> None:
        likes = self._likes(optimizer)
        numbers = {key: number for number, key in enumerate(likes)}
        groups, position = [], 0
        keys = list(likes)
        saved_groups = state["param_groups"]
        if len(saved_groups) != len(optimizer.param_groups):
            raise CheckpointError(
                f"{name!r} has {len(optimizer.param_groups)} parameter groups, and "
                f"{len(saved_groups)} in the checkpoint"
            )
        for own, saved in zip(optimizer.param_groups, saved_groups, strict=True):
            count = len(own["params"])
            mine = keys[position : position + count]
            if set(mine) != set(saved["params"]):
                differ = sorted(map(str, set(mine) ^ set(saved["params"])))
                raise CheckpointError(
                    f"{name!r}: a parameter group has others than in the checkpoint: {differ[:5]}"
                )
            groups.append({**saved, "params": list(range(position, position + count))})
            position += count
        by_number = {numbers[key]: values for key, values in state["state"].items()}
        optimizer.load_state_dict({**state, "state": by_number, "param_groups": groups})
        # torch has cast them to the dtypes of the parameters.
        for key, values in state["state"].items():
            own_values = optimizer.state[likes[key]]
            for entry, value in values.items():
                if is_ours(value) and isinstance(own_values.get(entry), torch.Tensor):
                    own_values[entry] = value


def snapshot(state: Any) -> Any:
    """A copy of a state that nothing done to its objects changes: tensors on the host, of xla
    tensors this process's shards."""
    staged = stand_ins.replaced(state, stand_ins.staged)
    return _copied(staged)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


def _named_parameters(module: nn.Module) -> Iterator[tuple[torch.Tensor, set[str]]]:
    for name, parameter in module.named_parameters():
        yield parameter, get_fqns(module, name)


def _marked(value: Any, path: Path, kinds: dict[str, Kind]) -> Any:
    """``value`` with marks in place of its tensors, whose kinds are noted."""
    if isinstance(value, torch.Tensor):
        name = ".".join(map(str, path))
        if name in kinds:
            raise CheckpointError(f"a checkpoint of two tensors that would both be named {name!r}")
        kinds[name] = kind_of(value)
        return {_MARK: name, "kind": kinds[name]}
    if isinstance(value, Mapping):
        return {key: _marked(each, (*path, key), kinds) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [_marked(each, (*path, i), kinds) for i, each in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


_Use = Callable[[Kind, str, Any], torch.Tensor | None]
"""What there is of an object's own to load a tensor of some kind and name into."""


def _own_or_none(kind: Kind, name: str, own: Any) -> torch.Tensor | None:
    return own if fits(kind, own) else None


def _own_of_module(kind: Kind, name: str, own: Any) -> torch.Tensor | None:
    """Whatever its dtype and place: a module's tensors are where they are to be."""
    if isinstance(own, torch.Tensor) and size_of(own) != tuple(kind["size"]):
        raise CheckpointError(
            f"{name!r} is of size {list(size_of(own))}, and of {kind['size']} in the checkpoint"
        )
    return own if isinstance(own, torch.Tensor) else None


def _filled(
    value: Any,
    path: Path,
    own: Any,
    likes: dict[Any, Any],
    use: _Use,
    targets: dict[str, torch.Tensor],
) -> Any:
    """``value``, which `_marked` has made, with tensors again: those of ``own`` where they fit."""
    if isinstance(value, dict) and _MARK in value:
        name, kind = value[_MARK], value["kind"]
        like = likes.get(path[2]) if len(path) > 2 and path[1] == "state" else None
        found = use(kind, name, own)
        targets[name] = like_saved(kind, name, like) if found is None else found
        return targets[name]
    if isinstance(value, dict):
        there = own if isinstance(own, Mapping) else {}
        return {
            key: _filled(each, (*path, key), there.get(key), likes, use, targets)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        known = list(own) if isinstance(own, list | tuple) else []
        known += [None] * (len(value) - len(known))
        items = [
            _filled(each, (*path, i), known[i], likes, use, targets) for i, each in enumerate(value)
        ]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _without_tuples(value: Any) -> Any:
    """Lists in place of tuples with tensors, into which torch's planners don't look."""
    if isinstance(value, Mapping):
        return {key: _without_tuples(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [_without_tuples(each) for each in value]
        if isinstance(value, list):
            return items
        has_tensors = any(isinstance(each, torch.Tensor | list | dict) for each in items)
        return items if has_tensors else value
    return value


def _check_plain(structure: Any, name: str) -> None:
    buffer = io.BytesIO()
    try:
        torch.save(structure, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # whatever pickling raises
        raise CheckpointError(
            f"the state of {name!r} has what is neither a tensor nor plain data, so loading it "
            f"would run code ({str(error).splitlines()[0]}): let its state_dict() give numbers, "
            "strings, lists, dicts and tensors, or name its classes to "
            "torch.serialization.add_safe_globals"
        ) from error


def _check_stored(value: Any, stored: Mapping[str, Described]) -> None:
    """Raise if marks are of tensors that aren't there, before memory is taken for them."""
    if isinstance(value, dict) and _MARK in value:
        name, kind = value[_MARK], value.get("kind")
        told = (kind.get("dtype"), kind.get("size")) if isinstance(kind, dict) else ()
        dtype, sizes = stored.get(name, (None, ()))
        if told != (dtype, list(sizes)):
            raise CheckpointError(f"a checkpoint that tells of {name!r} what isn't in it")
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_stored(each, stored)


def _check_same(name: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    missing = sorted(set(own) - set(saved))
    unexpected = sorted(set(saved) - set(own))
    if missing or unexpected:
        raise CheckpointError(
            f"{name!r} isn't the module that was saved: not in the checkpoint {missing[:5]}, only "
            f"there {unexpected[:5]}"
        )


def _restore_module(module: nn.Module, state: dict[str, Any]) -> None:
    """Its own tensors have been loaded into; what else ``state_dict`` gives is up to the module."""
    own = {memory_of(t) for t in (*module.parameters(), *module.buffers())}
    if all(isinstance(v, torch.Tensor) and memory_of(v) in own for v in state.values()):
        return
    torch_state_dict.set_model_state_dict(module, state)


def memory_of(tensor: torch.Tensor) -> tuple[bool, int]:
    """Which memory a tensor sees."""
    if is_ours(tensor):
        return True, id(tensor._storage_)
    return False, cpp_address(tensor.untyped_storage())
