"""Private attributes of objects (``func._schema``) are read in `base/torch_private/attributes.py`
and `base/jax_private.py` alone, and this version's objects have them all."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import jax
import pytest
import torch
from jax._src import sharding_impls
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from tests.base.test_private_apis import HERE, name_called
from tools import import_graph as graph
from xla_dtensor.base import jax_private, torch_private
from xla_dtensor.base.torch_private import attributes as at

# Of Python's own library and NumPy, which have no public way to it.
PYTHON = {
    "_getframe": "sys: the caller's frame",
    "_current_frames": "sys: the frames of other threads",
    "_exit": "os: end a process at once",
    "_fields": "documented: a namedtuple's names",
    "_asdict": "documented: a namedtuple as a dict",
    "_replace": "documented: a namedtuple with other values",
    "_filters_mutated": "warnings: the filters were put back by hand",
    "_get_dump": "abc: the classes registered with an ABC",
    "_GeneratorContextManager": "contextlib: the frames of with-blocks",
    "_rand": "NumPy: the generator behind numpy.random's functions",
    "_bit_generator": "NumPy: the bits behind a RandomState",
}

# What we put on objects of others.
OURS = {
    "_managed": "on a parameter: who manages it (parallel)",
    "_xla_grad_hook": "on a leaf: the hook that lays its gradient out (tensors)",
    "_zero": "on an optimizer: its sharding (parallel)",
    "_xla_dtensor_rows": "on a torchtitan dispatcher: the rows it has sent",
}

# Of other libraries, each in the modules that are about it.
LIBRARIES = {
    "ecosystem.accelerate": "_cpu _mixed_precision _optimizers _prepare_device_mesh _prepare_tp"
    " _reset_state _shared_state _validate_accelerator",
    "ecosystem.huggingface_hub": "_get_unique_id",
    "ecosystem.ignite": "_SerialModel _check_arg",
    "ecosystem.lightning": "_AcceleratorConnector _Connector _atomic_save _check_and_init_precision"
    " _check_strategy_and_fallback _choose_auto_accelerator _collect_rng_states _device_mesh"
    " _num_nodes_flag _parallel_devices _precision_flag _precision_input _precision_instance"
    " _precision_plugin_flag _strategy_flag",
    "ecosystem.spmd_types": "_build_rank_to_group_local _from_pg _get_local_tensor_mode"
    " _indices_to_layout _make_axis_layout _pg_for_axis _pg_to_mesh_axis _register_name",
    "ecosystem.torchtitan": "_LossParallelCrossEntropy _combine_token_exchange"
    " _dispatch_token_exchange _forward_backward_body _maybe_compile _shares_storage"
    " _sync_token_count_exchange _token_count_exchange _validate_cuda_graphs",
    "ecosystem.torchvision": "_has_ops",
    "ecosystem.transformers": "_load_rng_state _n_gpu _save_rng_state _setup_devices"
    " _is_user_defined _pad_token_tensor _optimize_model_for_decode"
    " _attn_implementation _can_compile_fullgraph",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def read(tree: ast.AST) -> Iterator[tuple[ast.expr, str, int]]:
    """Each private attribute that is named in a module: of what, its name, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not ast.unparse(node).startswith("torch.ops."):  # an operator, or a library of them
                yield node.value, node.attr, node.lineno
        elif isinstance(node, ast.Call):
            name = name_called(node)
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if name in ("getattr", "hasattr", "setattr", "delattr") and len(node.args) > 1:
                of, asked = node.args[0], texts[:1]
            elif name in ("attrgetter", "methodcaller"):
                of, asked = node, texts
            else:
                continue
            yield from ((of, t, node.lineno) for t in asked if isinstance(t, str) and is_private(t))


def made(tree: ast.AST) -> Iterator[str]:
    """The names that a module, its classes and their methods define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif is_own_attribute(node):
            yield node.attr
        if isinstance(node, ast.Module | ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign | ast.AnnAssign):
                    target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
                    yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
                    if line.value is not None and ast.unparse(target) == "__slots__":
                        names = [n for n in ast.walk(line.value) if isinstance(n, ast.Constant)]
                        yield from (n.value for n in names)


def is_own_attribute(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """``self.name = ...``."""
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and is_self(node.value)


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign(modules: dict[str, ast.Module]) -> Iterator[str]:
    """Private attributes that no module of these defines, and that aren't listed above."""
    own = {name for tree in modules.values() for name in made(tree)}
    for module, tree in modules.items():
        short = module.removeprefix("xla_dtensor.")
        libraries = [names.split() for at, names in LIBRARIES.items() if short.startswith(at)]
        allowed = own.union(PYTHON, OURS, *libraries)
        for _, name, line in read(tree):
            if name not in allowed and not hasattr(torch.ops.aten, name):
                yield f"{short}:{line} reads {name}"


def test_attributes_of_others_are_read_in_two_modules(trees: dict[str, ast.Module]) -> None:
    assert not (found := list(foreign(trees))), "\n".join(found)


@pytest.fixture(scope="module")
def borrowed() -> set[str]:
    """The private attributes that the two modules read."""
    homes = tuple(HERE.values())
    trees = [ast.parse(p.read_text()) for n, p in graph.modules().items() if n.startswith(homes)]
    return {name for tree in trees for _, name, _ in read(tree)}


def test_nobody_else_reads_those(borrowed: set[str], trees: dict[str, ast.Module]) -> None:
    """Also where a class of ours has an attribute of the same name, which it reads of itself."""
    found = [
        f"{module}:{line} reads {name} of {ast.unparse(of)}"
        for module, tree in trees.items()
        for of, name, line in read(tree)
        if name in borrowed and not is_self(of) and name != "_local"  # a tensor's of ours
    ]
    assert not found, "\n".join(found)


def test_lists_name_what_is_used(trees: dict[str, ast.Module]) -> None:
    used = {name for tree in trees.values() for _, name, _ in read(tree)}
    listed = {name for names in LIBRARIES.values() for name in names.split()}
    assert PYTHON.keys() | OURS.keys() | listed <= used


@pytest.mark.parametrize(
    "text",
    [
        "func._schema",
        "getattr(func, '_schema', None)",
        "operator.attrgetter('_schema')(func)",
        "mesh._get_root_mesh().mesh",
        "self._n_microbatches",
        "module._buffers[name] = x",
    ],
)
def test_others_are_found(text: str) -> None:
    assert list(foreign({"xla_dtensor.a": ast.parse(text)}))


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self):\n        self._n = 1\n        return other._n",
        "class A:\n    _n: int\na._n",
        "aten._to_copy.default",
        "torch.ops._c10d_functional.all_reduce",
        "point._asdict()",
        "x.__dict__",
    ],
)
def test_own_ones_are_not(text: str) -> None:
    assert not list(foreign({"xla_dtensor.a": ast.parse(text)}))


# --- this version has each -----------------------------------------------------------------------

ADD = torch.ops.aten.add.Tensor


@torch.library.custom_op("xla_dtensor_tests::private_attributes", mutates_args=())
def an_op(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def parameter() -> torch.Tensor:
    at.make_parameter(x := torch.ones(2).as_subclass(type("Other", (torch.Tensor,), {})))
    return x


def hooked() -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: grad)
    x.register_post_accumulate_grad_hook(lambda x: None)
    return x


def with_forward_hooks() -> nn.Module:
    module = nn.ReLU()
    module.register_forward_hook(repr)
    module.register_forward_pre_hook(print)
    return module


def global_hooks_while(*hooks: Any) -> list[Any]:
    handles = [nn.modules.module.register_module_forward_hook(hook) for hook in hooks]
    try:
        return at.global_forward_hooks()
    finally:
        for handle in handles:
            handle.remove()


def ignoring() -> nn.Module:
    module = nn.Linear(1, 1)
    names = ["weight"]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    return module


def distributed(module: nn.Module) -> nn.Module:
    return torch.distributed.tensor.distribute_module(module, mesh())


def scripted_as() -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @functools.wraps(function)
    def update(x: Any, *others: Any) -> Any:  # which TorchScript doesn't take
        return function(x)

    at.set_scripted_as(update, function)
    return torch.jit.script(update)(torch.ones(1)).item()


def scaler() -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu")
    at.set_notes_of_scaler(made, {})
    return made


def after_one_batch() -> Any:
    batches = iter(torch.utils.data.DataLoader([1.0, 2.0]))  # type: ignore[arg-type]
    next(batches)
    return batches


@functools.cache
def mesh() -> DeviceMesh:
    return xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


def remade() -> Any:
    return at.mesh_of(at.layout_of_mesh(mesh()), list(range(8, 0, -1)), ("dp", "tp"), mesh())


def schedule() -> Any:
    cls = type("Schedule", (torch_private.PipelineScheduleBase,), {})
    cls.__abstractmethods__ = frozenset()
    return cls(2, nn.functional.mse_loss)


class Stage:
    """As much of a stage of torch 2.13 as is set."""

    class _stage_meta:
        inputs: Any = None


def input_count() -> int:
    at.set_input_count(stage := Stage(), 3)
    return len(stage._stage_meta.inputs)


def recorded() -> Any:
    module = importlib.import_module(torch_private.debug_mode())
    mode = module.DebugMode()
    call = module._OpCall(ADD, (1, 2), {}, 0)
    at.record_call(mode, call)
    at.record_result(mode, call, 3)
    return mode.operators == [call]


def redistribution(**options: Any) -> Any:
    context = importlib.import_module(torch_private.DTENSOR_UTILS).ExplicitRedistributionContext
    with context(**options):
        return at.explicit_redistribution(context)


def written_view() -> torch.Tensor:
    """One made under `no_grad`, whose base has been written to."""
    with torch.no_grad():
        base = torch.ones(2, requires_grad=True)
        view = base.view(2, 1)
        base.mul_(2)
    return view


# By the name in `attributes.py`: something that is true if this torch has it.
SAMPLES: dict[str, Callable[[], Any]] = {
    "schema_of": lambda: at.schema_of(ADD).name == "aten::add",
    "packet_name": lambda: at.packet_name(torch.ops.aten.add) == "aten::add",
    "custom_op_name": lambda: at.custom_op_name(an_op).endswith("::private_attributes"),
    "kernel_of": lambda: at.kernel_of(ADD, torch_private.DispatchKey.CPU)(torch.ones(1), 2) == 3,
    "cpp_address": lambda: at.cpp_address(torch.ones(1).untyped_storage()) != 0,
    "untyped_storage_of": lambda: at.untyped_storage_of(torch.ones(2).storage()).nbytes() == 8,
    "is_view": lambda: at.is_view(torch.ones(2)[:1]) and not at.is_view(torch.ones(2)),
    "hooks_of_tensor": lambda: len(at.hooks_of_tensor(hooked()) or ()) == 1,
    "hooks_after_accumulation": lambda: len(at.hooks_after_accumulation(hooked()) or ()) == 1,
    "make_parameter": lambda: isinstance(parameter(), nn.Parameter),
    "sequence_number_of": lambda: at.sequence_number_of((hooked() + 1).grad_fn) >= 0,
    "is_leaf": lambda: at.is_leaf(written_view()) and not at.is_leaf(hooked() + 1),
    "parameters_of": lambda: list(at.parameters_of(nn.Linear(1, 1))) == ["weight", "bias"],
    "buffers_of": lambda: "running_mean" in at.buffers_of(nn.BatchNorm1d(1)),
    "submodules_of": lambda: list(at.submodules_of(nn.Sequential(nn.ReLU()))) == ["0"],
    "forward_hooks_of": lambda: at.forward_hooks_of(with_forward_hooks()) == [print, repr],
    "global_forward_hooks": lambda: global_hooks_while(print)[-1:] == [print],
    "names_that_ddp_ignores": lambda: at.names_that_ddp_ignores(ignoring()) == {"weight"},
    "is_distributed": lambda: at.is_distributed(distributed(nn.Linear(1, 1))),
    "set_distributed": lambda: at.set_distributed(m := nn.ReLU()) or at.is_distributed(m),
    "scripted_module": lambda: at.scripted_module(torch.jit.script(nn.ReLU())).getattr("training"),
    "type_of_scripted": lambda: torch_private.ConcreteModuleType.from_jit_type(
        at.type_of_scripted(at.scripted_module(torch.jit.script(nn.ReLU())))
    ).get_attributes(),
    "set_scripted_as": lambda: scripted_as() == 2,
    "step_hooks_of": lambda: at.step_hooks_of(torch.optim.SGD([torch.ones(1)])) == [],
    "notes_of_scaler": lambda: at.notes_of_scaler(torch.amp.GradScaler("cpu")) == {},
    "set_notes_of_scaler": lambda: at.notes_of_scaler(scaler()) == {},
    "batches_yielded": lambda: at.batches_yielded(after_one_batch()) == 1,
    "metadata_path": lambda: at.metadata_path(FileSystemReader("/x"), None).name == ".metadata",
    "root_mesh": lambda: at.root_mesh(mesh()["tp"]) is mesh(),
    "cut_from": lambda: at.cut_from(mesh()["tp"]) is mesh() and at.cut_from(mesh()) is None,
    "device_numbers": lambda: at.device_numbers(mesh()["tp"]).tolist() == list(range(8)),
    "layout_of_mesh": lambda: at.layout_of_mesh(mesh()) == at.layout_of_mesh(remade()),
    "flattened_meshes": lambda: at.flatten(mesh(), "all") is at.flattened_meshes(mesh())["all"],
    "flatten": lambda: at.flatten(mesh(), "all").size() == 8,
    "mesh_of": lambda: at.device_numbers(remade()).tolist() == list(range(8, 0, -1)),
    "device_numbers_of_layout": lambda: (
        at.device_numbers_of_layout(mesh()["tp"]).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    ),
    "layout_pieces": lambda: at.layout_pieces(mesh()) == [[(2, 4)], [(4, 1)]],
    "layout_sizes": lambda: at.layout_sizes(at.layout_of_mesh(mesh())) == [2, 4],
    "microbatch_count": lambda: at.microbatch_count(schedule()) == 2,
    "has_backward": lambda: at.has_backward(schedule()),
    "loss_function": lambda: at.loss_function(schedule()) is nn.functional.mse_loss,
    "chunk_specs": lambda: at.chunk_specs(schedule()) == (None, None),
    "internal_losses": lambda: at.internal_losses(schedule()) == [],
    "split_inputs": lambda: len(at.split_inputs(schedule(), (torch.ones(2),), {})[0]) == 2,
    "merge_outputs": lambda: len(at.merge_outputs(schedule(), [torch.ones(1)] * 2)) == 2,
    "set_input_count": lambda: input_count() == 3,
    "custom_op_handlers": lambda: at.custom_op_handlers(torch_private.op_dispatcher) is not None,
    "record_call": recorded,
    "record_result": recorded,
    "explicit_redistribution": lambda: (
        redistribution(strict=True) == (True, True)
        and redistribution(mode="warn") == (False, False)
        and redistribution(enable=False) is None
    ),
}


@pytest.mark.filterwarnings("ignore:.*(TypedStorage|torch.jit.script).*is deprecated")
@pytest.mark.parametrize("name", SAMPLES)
def test_this_torch_has_it(name: str) -> None:
    assert SAMPLES[name]()


def test_each_has_a_sample() -> None:
    names = set(made(ast.parse(Path(at.__file__).read_text())))
    # Context parallelism, once imported, is asked in each call: tests/integration has the test.
    names.remove("indices_dealt")
    assert {name for name in names if not name.startswith("_")} == SAMPLES.keys()


def test_this_jax_has_it() -> None:
    sharding = sharding_impls.GSPMDSharding.get_replicated(jax.devices())
    assert jax_private.hlo_sharding_of(sharding).is_replicated()
