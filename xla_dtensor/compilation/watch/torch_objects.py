"""Followers of torch's objects: modules, tensors, operators, optimizers."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler

from xla_dtensor.base.torch_private import (
    CustomOpDef,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    custom_op_definitions,
)
from xla_dtensor.base.torch_private.attributes import packet_name
from xla_dtensor.compilation.code.names import names_of
from xla_dtensor.compilation.code.reflection import HOOKS, code_of
from xla_dtensor.compilation.code.scripted import Scripted
from xla_dtensor.compilation.objects.places import Elements, Entries, Items, Slots
from xla_dtensor.compilation.trace.hyperparameters import is_input
from xla_dtensor.compilation.trace.stepped import ReadState, SteppedOptimizer, of_one
from xla_dtensor.compilation.watch.attributes import (
    MODULE_OWN,
    MODULE_PARTS,
    OF_SCHEDULERS,
    methods,
    only_assigned,
    slots,
)
from xla_dtensor.compilation.watch.python_objects import of_dict
from xla_dtensor.compilation.watch.walk import Followed, Walk
from xla_dtensor.tensors.attributes import OWN_ATTRIBUTES

OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator, CustomOpDef)
_HOOK_FLAGS = (
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks_with_kwargs",
)
# Hooks that only code which saves or loads a module's state reads.
_SAVING = ("_state_dict_hooks", "_state_dict_pre_hooks")
_LOADING = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def of_module(walk: Walk, module: nn.Module, path: str) -> None:
    """Its parameters, buffers, submodules and hooks, and what the user has added."""
    cls, own, reached = type(module), module.__dict__, walk.reached
    reached.typed.append(module)
    # The dicts themselves: ``Sequential.pop()`` replaces that of submodules, unpickling all.
    reached.live.append((operator.itemgetter(*MODULE_PARTS, *HOOKS), own))
    for part in MODULE_PARTS:
        inner = own.get(part)
        if inner is not None:  # an empty one may be filled: a `ModuleList` of adapters
            place = Items(inner, path)
            walk.place(place)
            place.carried = walk.taken(place, inner)
            for name, value in inner.items():
                if name not in place.carried:
                    walk.follow(value, f"{path}.{name}")
            reached.note(f"the order in {path}.{part}", "order", tuple(inner))
    tables = [*HOOKS]
    if "state_dict" in walk.names.attributes:
        tables += _SAVING
        walk.follow(own.get("_non_persistent_buffers_set"), f"{path}'s buffers to leave out")
    if "load_state_dict" in walk.names.attributes:
        tables += _LOADING
    if any(map(own.get, HOOKS)):
        reached.probe(f"how {path} calls its hooks", functools.partial(_hook_flags, own))
    for table in tables:
        if own.get(table) is not None:
            walk.hooks(own[table], f"{path}.{table}")
    names = [name for name in own if name not in MODULE_OWN]
    if not walk.of_library(cls):
        inherited = walk.inherited_names(cls)
        names = [n for n in names if n in inherited or walk.names.is_read(n)]
        names += [n for n in HOOKS[:2] if n not in names]
        slots(walk, module, path)
    only_assigned(walk, module, path, names)
    walk.read(Entries(own, names, path), but_for=HOOKS)
    if isinstance(module, dict):  # a user's class may be both
        of_dict(walk, module, path)
    methods(walk, cls)


def of_scripted(walk: Walk, module: torch.jit.ScriptModule, path: str) -> None:
    """What the module's code in TorchScript may read: all that it holds."""
    walk.reached.typed.append(module)
    scripted = Scripted(module, path)
    walk.reached.scripted.append(scripted)
    for name, value in scripted.held.items():
        if isinstance(value, torch.Tensor):
            walk.follow(value, f"{path}.{name}")
            walk.reached.probes.append((functools.partial(scripted.is_still, name), True))
        else:
            walk.reached.probe(f"{path}.{name}", functools.partial(scripted.value, name))
    for name, inner in module.named_children():
        walk.follow(inner, f"{path}.{name}")
    walk.read(Entries(vars(module), ["forward", *_added(walk, module)], path))


def of_operator(walk: Walk, operator: Any, path: str) -> None:
    """An operator, and the functions of which ``torch.library.custom_op`` has made it. (Those of a
    ``Library`` only torch's dispatcher has.)"""
    if isinstance(operator, OpOverload):
        operator = operator.overloadpacket
    if isinstance(operator, OpOverloadPacket):
        operator = custom_op_definitions.get(packet_name(operator))
    if isinstance(operator, CustomOpDef):
        own = vars(operator)
        functions = [name for name in own if name.endswith(("_fn", "_fns"))]
        walk.read(Entries(own, [*functions, *_added(walk, operator)], path))


def of_mesh(walk: Walk, mesh: DeviceMesh, path: str) -> None:
    """What the user has put on it."""
    walk.read(Entries(vars(mesh), _added(walk, mesh), path))


def _added(walk: Walk, value: Any) -> list[str]:
    """What the code reads of an object of torch's, and torch hasn't put there."""
    own = vars(value).keys() & walk.names.attributes - {"forward"}
    return sorted(name for name in own if not name.startswith("_"))


def of_tensor(walk: Walk, tensor: torch.Tensor, path: str) -> None:
    """What the user has put on a tensor, or may, and what else code may ask of it that has no
    guard of its own."""
    names, reached = walk.names, walk.reached
    reached.tensors[id(tensor)] = tensor, path
    own = vars(tensor)
    added = own.keys() - OWN_ATTRIBUTES
    read = [n for n in own if n in added and names.is_read(n)] if added else []
    users = not walk.of_library(type(tensor))
    if read or walk.asks_for_absent or users:
        walk.read(Entries(own, read, path))
    if names.assigned:
        only_assigned(walk, tensor, path, read)
    if "_version" in names.attributes and not tensor.is_inference():
        reached.probe(f"{path}._version", lambda: tensor._version)
    if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu":
        reached.probe(f"the form of {path}", lambda: (type(tensor), tensor.shape, tensor.dtype))
        if "requires_grad" in names.attributes:
            reached.probe(f"{path}.requires_grad", lambda: tensor.requires_grad)
    if users:
        methods(walk, type(tensor))
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        # The guards compare which hooks there are; here is what the hooks' code reads.
        hooks = getattr(tensor, name, None)
        for number, hook in enumerate(hooks.values() if hooks else ()):
            walk.follow(hook, f"{path}.{name}[{number}]")


def _hook_flags(own: dict[str, Any]) -> list[Any]:
    """With what a module calls each of its hooks."""
    given = [own.get(name) or () for name in _HOOK_FLAGS]
    hooks = (key for name in HOOKS for key in own.get(name) or ())
    return [own.get("_is_full_backward_hook"), *([key in g for g in given] for key in hooks)]


def of_optimizer(walk: Walk, optimizer: Optimizer, path: str) -> None:
    """What the step's own code reads of it, and that of its class and its hooks; what else its
    ``step`` reads has guards of its own."""
    names, reached = walk.names, walk.reached
    reached.note(f"{path}'s class", "class", type(optimizer))
    reached.typed.append(optimizer)
    methods(walk, type(optimizer))
    own = vars(optimizer)
    wanted = [n for n in own if names.is_read(n) and n not in ("param_groups", "state")]
    only_assigned(walk, optimizer, path, [*wanted, "param_groups", "state"])
    walk.read(Entries(own, wanted, path))
    _hooks(walk, optimizer, path)
    reached.optimizers[id(optimizer)] = optimizer
    if not walk.of_library(type(optimizer)):
        # Numbers, lists and tensors that a user's optimizer counts up and replaces. What a tensor
        # there refers to is followed once the optimizer is known to step (`of_stepped`).
        whole = optimizer.state
        places = [(f"{path}.state[{i}]", s) for i, s in enumerate(whole.values()) if of_one(s)]
        for where, state in ((f"{path}.state", whole), *places):
            keys = [k for k, v in state.items() if type(k) is str and not isinstance(v, dict)]
            walk.read(Entries(state, keys, where))
            reached.settings |= {(id(state), key) for key in keys}
    if "param_groups" not in names.attributes:
        return
    walk.place(Slots(optimizer, ("param_groups",), path))
    walk.place(Elements(optimizer.param_groups, f"{path}.param_groups"))
    for i, group in enumerate(optimizer.param_groups):
        where = f"{path}.param_groups[{i}]"
        # Not numbers that are inputs: they may differ from call to call.
        read = [
            key
            for key, value in group.items()
            if names.is_read(key) and not (names.feeds and is_input(key, value))
        ]
        compared = ["params", *(key for key in read if key != "params")]
        walk.read(Entries(group, compared, where))
        # Keys that the code names and the group lacks: the step may add them.
        others = [key for key in {*group, *names.attributes} if key not in compared]
        walk.place(Entries(group, others, where, guarded=False))
        reached.settings |= {(id(group), key) for key in (*compared, *others)}


def _hooks(walk: Walk, optimizer: Optimizer, path: str) -> None:
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks = getattr(optimizer, name, None)
        if hooks is not None:  # a wrapper that never called Optimizer's __init__
            walk.hooks(hooks, f"{path}.{name}")


def of_stepped(walk: Walk, stepped: SteppedOptimizer, path: str) -> None:
    """What an optimizer's ``step`` reads: all of its param groups but the numbers that are inputs,
    and its state."""
    optimizer, groups = stepped.optimizer, stepped.optimizer.param_groups
    walk.reached.note(path, "stepped optimizer", (id(optimizer), len(groups)))
    walk.place(Slots(optimizer, ("param_groups", "state"), path))
    walk.place(Elements(groups, f"{path}.param_groups"))
    carried = {one.where() for one in walk.reached.carried}
    for i, group in enumerate(groups):
        # Not entries that are inputs, or that the step's code assigns: others look at those.
        inputs = {key for key in group if (id(group), key) in carried}
        if i < len(stepped.numbers):
            inputs |= stepped.numbers[i] | stepped.assigned[i]
        where = f"{path}.param_groups[{i}]"
        names = [key for key in group if key not in inputs]
        walk.place(Entries(group, names, where))
        for name in names:
            walk.follow(group[name], f"{where}[{name!r}]")
    _state(walk, optimizer.state, f"{path}.state", carried)
    for number, state in enumerate(optimizer.state.values()):
        if of_one(state):
            _state(walk, state, f"{path}.state[{number}]", carried)
    if id(optimizer) not in walk.reached.optimizers:
        methods(walk, type(optimizer))
        _hooks(walk, optimizer, path)


def _state(walk: Walk, state: dict[Any, Any], path: str, carried: set[tuple[int, Any]]) -> None:
    place = Items(state, path, with_keys=False)
    walk.place(place)
    place.carried = frozenset(key for key in state if (id(state), key) in carried)
    for key, value in state.items():
        if key not in place.carried and not of_one(value):
            walk.follow(value, f"{path}[{key!r}]")


def of_read_state(walk: Walk, read: ReadState, path: str) -> None:
    """The state of an optimizer that doesn't step, if the step's code names it: it became a root by
    names of all code that might have run."""
    if "state" not in walk.names.attributes:
        return
    walk.place(Slots(read.optimizer, ("state",), path))
    walk.follow(read.optimizer.state, f"{path}.state")


def of_scheduler(walk: Walk, scheduler: LRScheduler, path: str) -> None:
    """What the step's code reads: its own step changes it in every call."""
    cls, names, own = type(scheduler), set(walk.names.attributes), vars(scheduler)
    walk.reached.note(f"{path}'s class", "class", cls)
    walk.reached.typed.append(scheduler)
    for base in filter(walk.of_library, cls.__mro__):  # ``get_lr()`` reads ``base_lrs``
        for name in names & vars(base).keys() - OF_SCHEDULERS:
            if (code := code_of(vars(base)[name])) is not None:
                names |= names_of(code).attributes
    walk.read(Entries(own, [name for name in own if name in names], path))
    methods(walk, cls)


def global_hooks(walk: Walk) -> None:
    """Hooks that are called for all modules and optimizers."""
    registered = (f"{what}_registration" for what in ("buffer", "module", "parameter"))
    kinds = ("forward", "forward_pre", "backward", "backward_pre", *registered)
    names = [(torch_module, f"_global_{kind}_hooks") for kind in kinds]
    names += [(torch_optimizer, f"_global_optimizer_{kind}_hooks") for kind in ("pre", "post")]
    for where, name in names:
        walk.hooks(getattr(where, name), f"{where.__name__}.{name}")


KINDS = (
    Followed(torch.Tensor, "tensor", of_tensor),
    Followed(OPERATORS, "opaque", of_operator),
    Followed(torch.jit.ScriptModule, "module", of_scripted),
    Followed(nn.Module, "module", of_module),
    Followed(SteppedOptimizer, None, of_stepped),
    Followed(Optimizer, "optimizer", of_optimizer),
    Followed(ReadState, None, of_read_state),
    Followed(LRScheduler, "opaque", of_scheduler),
    Followed(DeviceMesh, "mesh", of_mesh),
)
