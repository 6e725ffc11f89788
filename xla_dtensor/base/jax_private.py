"""The private names of JAX that we use, and how they differ between versions 0.9 to 0.12.

Nothing else in the package names something private of JAX's. Nothing here imports JAX before it is
asked for something.

``jax.extend`` has some of these under public names. It guarantees no compatibility either, and
imports Pallas. `tests/base/test_private_apis.py` finds out whether a version has them all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from xla_dtensor.base.tables.borrowed import Borrowed

NAMES = {
    # --- tracing ---
    # The trace that JAX is in, to make a tracer of a constant without a value.
    "trace_ctx": "jax._src.core:trace_ctx",
    # Where in the user's code an equation is made, and in words.
    "current_source": "jax._src.source_info_util:current",
    "summarize_source": "jax._src.source_info_util:summarize",
    # The same number as a weakly typed one, which Python's numbers are.
    # jax.lax.convert_element_type makes it a strong one.
    "convert_element_type": "jax._src.lax.lax:_convert_element_type",
    # jnp.ones and the like with JAX's own default dtypes, and 64-bit ones where they are asked for.
    "explicit_x64_dtypes": "jax._src.config:explicit_x64_dtypes",
    # --- programs ---
    # All settings of a thread on which a traced program depends, as a tuple.
    "trace_context": "jax._src.config:trace_context",
    # Their options with XLA's flags, as XLA has read them.
    "CompileOptions": "jax._src.lib:xla_client.CompileOptions",
    # By class, what JAX does with an argument of a program that is launched.
    "shard_arg_handlers": "jax._src.interpreters.pxla:shard_arg_handlers",
    # A block's limit below which programs don't go to the disk; jax.config sets it for all threads.
    "persistent_cache_min_compile_time_secs": (
        "jax._src.config:persistent_cache_min_compile_time_secs"
    ),
    # What else is part of a program's key in the cache on disk.
    "cache_key_hook": "jax._src.cache_key:custom_hook",
    # A block whose programs' keys leave out the addresses of functions that XLA calls back when it
    # partitions them, and those functions by address.
    "without_addresses": "jax._src.config:remove_custom_partitioning_ptr_from_cache_key",
    "partitioning_callbacks": "jax._src.custom_partitioning:_sharding_callbacks",
    "PartitioningCallback": "jax._src.custom_partitioning:_ShardingCallbackInfo",
    # cuDNN's attention with the rows' sums, and whether cuDNN is there. It could be public
    # jax.nn.dot_product_attention(implementation="cudnn", return_residual=True), which wants heads
    # behind positions.
    "fused_attention": "jax._src.cudnn.fused_attention_stablehlo",
    # The backward pass of the TPU's attention kernel.
    "splash_attention_backward": (
        "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
        ":_splash_attention_bwd"
    ),
    # What `let_64_bit_equations_lower` mends.
    "lower_per_platform": "jax._src.interpreters.mlir:lower_per_platform",
    # What `let_empty_results_be_sharded` mends.
    "check_out_shardings": "jax._src.interpreters.pxla:_maybe_get_and_check_out_shardings",
    "UNSPECIFIED": "jax._src.sharding_impls:UNSPECIFIED",
    # --- devices and processes ---
    # Whether JAX has been started; every public function that would tell starts it.
    "backends_are_initialized": "jax._src.xla_bridge:backends_are_initialized",
    # XLA's clients by platform, also those whose devices aren't the default ones.
    "backends": "jax._src.xla_bridge:backends",
    # The client of JAX's coordinator, and what somebody else has told jax.distributed.
    "global_state": "jax._src.distributed:global_state",
    # Launchers that JAX detects: Slurm, Open MPI, Kubernetes, Cloud TPUs.
    "cluster_types": "jax._src.clusters:ClusterEnv._cluster_types",
    # Whether this machine has TPUs, and libtpu, without starting JAX.
    "tpu_chips": "jax._src.hardware_utils:num_available_tpu_chips_and_device_id",
    "get_tpu_library_path": "jax._src.cloud_tpu_init:get_tpu_library_path",
    # Plugins: having JAX look for them, the platforms of those that compile without a device, and
    # whether this machine has a GPU.
    "discover_plugins": "jax._src.xla_bridge:_discover_and_register_pjrt_plugins",
    "topology_factories": "jax._src.xla_bridge:_topology_factories",
    "has_visible_nvidia_gpu": "jax._src.hardware_utils:has_visible_nvidia_gpu",
}

_borrowed = Borrowed("jax", NAMES, __name__)
find, replace = _borrowed.find, _borrowed.replace


def __getattr__(name: str) -> Any:
    return _borrowed.get(name)


# --- versions: checked on 0.9.0, 0.9.2, 0.10.2, 0.11.2 and 0.12.0.1 ------------------------------


# XLA's description of a `GSPMDSharding`, in the same attribute in all of these.
hlo_sharding_of: Callable[[Any], Any] = attrgetter("_hlo_sharding")


def manual_axes(equation: Any) -> frozenset[str]:
    """The mesh axes along which a ``shard_map`` equation runs each device by itself."""
    parameters = equation.params
    # Named ``newly_`` since 0.10.
    found: frozenset[str] = parameters.get("newly_manual_axes", parameters.get("manual_axes"))
    return found


def loop_parts(equation: Any) -> tuple[int, int]:
    """How many of the operands of a ``scan`` equation are the same in each round, and how many it
    carries from one to the next; what is behind these is taken slice by slice."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Since 0.11 the structure of its operands says it.
    constants, carried, _ = params["ft_in"].update(list(equation.invars)).unpack()
    return len(list(constants)), len(list(carried))


def forget_partitioning(compiled: Any) -> None:
    """Let go of the functions that XLA has called back to partition a program, so that pickle can
    write it down: JAX keeps them with what was compiled, which needs them no longer."""
    unloaded = getattr(compiled._executable, "_unloaded_executable", None)
    if unloaded is not None and unloaded.keepalive:
        partitioning = find("PartitioningCallback")
        kept = [one for one in unloaded.keepalive if not isinstance(one, partitioning)]
        unloaded.keepalive = type(unloaded.keepalive)(kept)


def xla_flags() -> bytes:
    """XLA's flags as it has read them: once, from ``XLA_FLAGS`` or the file that this names,
    whatever the variable says by now."""
    options = _borrowed.get("CompileOptions")()
    options.executable_build_options.debug_options  # noqa: B018  (which puts them there)
    written: bytes = options.SerializeAsString()
    return written


def is_portable(compiled: Any) -> bool:
    """Whether a compiled program calls nothing back that is in this process alone."""
    unloaded = getattr(compiled._executable, "_unloaded_executable", None)
    return unloaded is not None and not (unloaded.keepalive or unloaded.host_callbacks)


def inlined() -> Any:
    """What ``jax.jit(inline=...)`` takes for a function whose equations go into the jaxprs of its
    callers, not a call of it. Until 0.10 that is ``True``, which since 0.11 keeps the call until
    the jaxpr is lowered."""
    import jax

    kinds = getattr(jax, "Inline", None)
    return True if kinds is None else kinds.JAX_EARLY


def jaxpr_of(closed: Any) -> Any:
    """The jaxpr of a ``ClosedJaxpr``, without the values of its constants, which it would keep
    alive. Since 0.11 the two are one class, where a variable is a constant if there is a value."""
    found = closed.jaxpr
    return type(closed)(closed, [None] * len(closed.consts)) if found is closed else found


@functools.cache
def let_empty_results_be_sharded() -> None:
    """XLA calls an empty result replicated, whatever was asked for. JAX before 0.10 takes that for
    a mistake of XLA's and refuses the program; later it looks at results with values alone."""
    import jax

    if tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 10):
        return
    unspecified, original = _borrowed.get("UNSPECIFIED"), _borrowed.get("check_out_shardings")

    def check(executable: Any, shardings: Any, devices: Any, avals: Any, effects: int) -> Any:
        empty = [getattr(aval, "size", 1) == 0 for aval in avals]
        asked = [
            unspecified if none else sharding
            for none, sharding in zip(empty, shardings, strict=True)
        ]
        found = original(executable, asked, devices, avals, effects)
        return [
            sharding if none and not isinstance(sharding, type(unspecified)) else own
            for none, sharding, own in zip(empty, shardings, found, strict=True)
        ]

    replace("check_out_shardings", check)


@functools.cache
def let_64_bit_equations_lower() -> None:
    """An equation with 64-bit values is lowered with 64-bit types on, as it was traced.

    ``jax.jit`` lowers with the setting of its caller. Where that is off, what JAX lowers by
    functions of its own (``argmax``, clamped indices) is cut to 32 bits halfway, and refused:
    64-bit values in a program of 32 bits are something that JAX sees only of us.
    """
    import jax

    original = _borrowed.get("lower_per_platform")

    def lower(context: Any, *args: Any, **kwargs: Any) -> Any:
        if not jax.config.jax_enable_x64:
            avals = (*(context.avals_in or ()), *(context.avals_out or ()))
            if any(getattr(getattr(aval, "dtype", None), "name", "") in _WIDE for aval in avals):
                with jax.enable_x64(True):
                    return original(context, *args, **kwargs)
        return original(context, *args, **kwargs)

    replace("lower_per_platform", lower)


_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


def varying_axes(array: Any) -> frozenset[str]:
    """The mesh axes of an enclosing ``shard_map`` along which an array differs from device to
    device."""
    import jax

    aval: Any = jax.typeof(array)
    if hasattr(aval, "vma"):  # until 0.9
        found: frozenset[str] = aval.vma
        return found
    return frozenset(aval.manual_axis_type.varying)
