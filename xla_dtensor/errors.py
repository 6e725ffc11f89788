"""The exceptions that xla_dtensor raises.

Each also is the builtin exception that torch raises in the same situation, so code written for
torch catches them.
"""

from __future__ import annotations


class XlaDTensorError(Exception):
    """Base of all exceptions that xla_dtensor raises on purpose: catch it to catch any of them.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(1)])  # raises a subclass of it
    """


class PlacementError(XlaDTensorError, ValueError, RuntimeError):
    """Raised for placements that don't fit the tensor or the mesh: give one placement per mesh dim,
    each of a tensor dim that exists. (torch raises a ValueError or a RuntimeError; it is both.)

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(1)])  # a tensor of one dim
    """


class MeshError(XlaDTensorError, RuntimeError):
    """Raised for a mesh that cannot be made or cut as asked: the message says what of its shape,
    names or devices to change.

    Example::

        import xla_dtensor as xd

        xd.DeviceMesh("xla", [0, 0])  # one device twice
    """


class MeshDimError(MeshError, KeyError):
    """Raised for the name of a mesh dim that the mesh doesn't have: take one of those that the
    message lists.

    Example::

        import xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        mesh["pp"]
    """

    __str__ = Exception.__str__  # KeyError's would quote the whole message


class DeviceCountError(MeshError):
    """Raised for a mesh that wants more devices than the XLA backend has: make it smaller, or, of
    simulated devices, make the largest mesh first or set ``JAX_NUM_CPU_DEVICES``.

    Example::

        import xla_dtensor as xd

        xd.init_device_mesh("xla", (8,))  # starts JAX with 8 simulated devices, if it has no others
        xd.init_device_mesh("xla", (4096,))
    """


class TopologyError(XlaDTensorError, ValueError):
    """Raised for devices to plan for that nobody can name: the message says which there are, what a
    mesh must have to fill them, or what is not installed.

    Example::

        import xla_dtensor as xd

        xd.abstract("v5x:4x4")  # no such kind
    """


class MeshMismatchError(XlaDTensorError, RuntimeError, ValueError):
    """Raised for tensors of different meshes in one operation: bring one to the other's mesh with
    ``redistribute(mesh, placements)``.

    Example::

        import torch, xla_dtensor as xd

        line = xd.init_device_mesh("xla", (8,), mesh_dim_names=("all",))
        grid = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("rows", "columns"))
        xd.distribute_tensor(torch.ones(8), line) + xd.distribute_tensor(torch.ones(8), grid)
    """


class LayoutRuleError(XlaDTensorError, ValueError, RuntimeError):
    """Raised for a layout rule that is malformed, registered twice, or contradicts the operation,
    its tensors or the mesh: correct the rule, or pass ``override=True``.

    Example::

        import xla_dtensor as xd

        xd.DistributedOp("Project", rule="b h")  # a notation has one ->
    """


class UnsupportedOpError(XlaDTensorError, NotImplementedError):
    """Raised for an operation without lowering and decomposition, or an unsupported form of one:
    the message says what to use instead.

    Example::

        import torch, xla_dtensor as xd

        torch.ones(8, device="xla").to_sparse()  # XLA has dense arrays only
    """


class NotInStepError(UnsupportedOpError):
    """Raised in a compiled step for what only eager code can do, such as giving a tensor from
    outside another shape or memory: do it before the step. Unless the step is compiled with
    ``watch="trace"``, its Python runs in every call instead.

    Example::

        import torch, xla_dtensor as xd

        x = torch.ones(2, 3, device="xla")
        xd.compile(lambda: x.t_().sum(), watch="trace")()
    """


class RandomNumbersError(XlaDTensorError, RuntimeError):
    """Raised for random numbers, also those of dropout, on a platform whose compiler gets them
    wrong: make them on the CPU (``torch.rand(..., device="cpu")``) and distribute them.

    Example::

        import numpy as np
        from xla_dtensor.base.random import threefry

        threefry.check("npu", lambda: (np.zeros(2, int), np.ones(2, int)))  # got, right
    """


class DataDependentError(XlaDTensorError, RuntimeError):
    """Raised for Python that needs a tensor's value inside a compiled step, where there is none
    yet: compute with tensors (``torch.where``), or return the tensor and look at it outside.

    Example::

        import torch, xla_dtensor as xd

        step = xd.compile(lambda x: x * 2 if x.sum() > 0 else x, watch="trace")
        step(torch.ones(8, device="xla"))
    """


class PerDeviceValueError(XlaDTensorError, RuntimeError):
    """Raised for a call whose result would be a different Python value on each device, though one
    process drives them all: look at ``local_values()``, or make it one value by a collective.

    Example::

        import xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        xd.collectives.axis_index(mesh).item()
    """


class PipelineError(XlaDTensorError, RuntimeError, ValueError):
    """Raised for a pipeline that can't be put together or run as asked: stages that are missing, a
    module that isn't on its stage's devices, a batch that doesn't divide into the microbatches. The
    message names the stage and what to change.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (1,), mesh_dim_names=("pp",))
        (on,) = xd.pipeline.stage_meshes(mesh)
        xd.pipeline.PipelineStage(torch.nn.Linear(8, 8), 0, 1, on)  # its parameters are on the CPU
    """


class DistributedError(XlaDTensorError, RuntimeError):
    """Raised where several processes can't find each other, don't fit together, or one of them is
    gone: the message names the variable, the process and its host.

    Attributes:
        of_others: whether it is another process that is gone, or hasn't come; when all are started
            again it need not come again. `xd.elastic.run` asks.

    Example::

        import xla_dtensor as xd

        xd.distributed.initialize("localhost:1234", num_processes=2, process_id=2)  # there are 0, 1
    """

    def __init__(self, *arguments: object, of_others: bool = False) -> None:
        super().__init__(*arguments)
        self.of_others = of_others


class HostsError(DistributedError, ValueError):
    """Raised by `elastic.run` for a number, a time or an endpoint with which no training could run:
    the message says which, and what to give.

    Example::

        import xla_dtensor as xd

        xd.elastic.run(print, hosts=(1, 4))  # where do they meet?
    """


class DivergenceError(DistributedError):
    """Raised where several processes are about to run different programs: all have to execute the
    same operations, on the same meshes, in the same order. The message has the operation and the
    user's line on both sides.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,))
        x = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0)])
        if xd.distributed.process_index() == 0:
            print(x)  # raises with two processes or more: the others don't ask for its value
    """


class StaleStepError(XlaDTensorError, RuntimeError):
    """Raised by a compiled step whose audit finds that its Python would now do something else: make
    what has changed an argument, or call ``clear_cache()`` when it changes. The call in which it is
    raised has computed nothing.

    Example::

        import time, torch, xla_dtensor as xd

        step = xd.compile(lambda x: x * time.process_time(), audit=1)  # reads what nobody watches
        step(torch.ones(8, device="xla"))
        step(torch.ones(8, device="xla"))
    """


class CheckpointError(XlaDTensorError, RuntimeError):
    """Raised for a checkpoint that can't be read, or isn't what it says it is: the message names
    the file. Take an older one (`CheckpointManager` does by itself).

    Example::

        import xla_dtensor as xd

        xd.checkpoint.FileSystemReader("no/such/folder").read_metadata()
    """


class CompiledFileError(XlaDTensorError, RuntimeError):
    """Raised for a file of compiled programs (``step.save_compiled``) that is damaged, or was made
    for other devices, versions or options than there are: the message names the file and the
    difference. Write it once more.

    Example::

        import xla_dtensor as xd

        xd.load_compiled("no/such/file", xd.compile(lambda x: x), trusted=True)
    """


class HorovodInternalError(XlaDTensorError, RuntimeError):
    """Raised for a collective of `xla_dtensor.horovod` that can't be: the ranks differ in its
    shape, dtype, reduction or root, wait for different ones, or one has ended. All ranks that take
    part get it, and it names them.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.run(lambda: hvd.allreduce(torch.ones(1 + hvd.rank())), np=2)  # shapes differ
    """


class HostsUpdatedInterrupt(XlaDTensorError, RuntimeError):
    """Raised by ``State.commit`` and ``check_host_updates`` of `xla_dtensor.horovod.elastic` when
    hosts have come or will go; `elastic.run` catches it.

    Args:
        skip_sync: whether the state need not be broadcast again, since hosts only went.

    Example::

        from xla_dtensor.errors import HostsUpdatedInterrupt

        raise HostsUpdatedInterrupt(skip_sync=True)
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have been added or removed")
        self.skip_sync = skip_sync
