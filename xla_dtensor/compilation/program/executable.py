"""A trace's jaxpr as an executable: lowered, then compiled by XLA or found in a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xla_dtensor import blocks
from xla_dtensor.base.random import rng
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.compilation.call.run import Outputs
from xla_dtensor.compilation.program.cache_keys import text_of
from xla_dtensor.compilation.program.input_layouts import (
    Pinning,
    compile_somehow,
    layouts,
    shardings_of,
)
from xla_dtensor.compilation.program.inputs import Groups, Inputs
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.compilation.scan.casts import casts_outside
from xla_dtensor.forms.form import Form
from xla_dtensor.layouts import Choice, choose_for, constrained, kept_apart
from xla_dtensor.mesh import Frame
from xla_dtensor.runtime import agreement
from xla_dtensor.runtime.memory import memory_of
from xla_dtensor.runtime.program_cache import kept_by_names


class Executable:
    """The executable of a program.

    Args:
        jaxpr: what it computes, from constants; its outputs are ``outputs`` in order, and behind
            them ``residuals`` arrays for a backward pass.
        groups: the inputs of the first call.
        donates: whether it may take the memory of its donated inputs over.
        executables: those compiled so far, by their text; None to lower the program and no more.
        options: for XLA.
        lays_out: whether its values lie where it communicates least (`layouts/`).
        in_blocks: whether its results have the same bits on any mesh (`blocks/`).

    Raises:
        UnsupportedOpError: they can't.

    Attributes:
        jaxpr: what is computed, laid out as was chosen, without ``executables``.
        lowered: the ``jax.stages.Lowered``, likewise.
        inputs: what goes in (`input_layouts.layouts`), likewise.
        compile: compiles that, given options for XLA.
        compiled: the ``jax.stages.Compiled``, with them.
        is_new: whether XLA had to compile it.
        digest: of its text.
        lowering: how the program's pins are lowered.
        layouts: where its values lie, if that was chosen.
    """

    compiled: Any
    jaxpr: Any = None
    lowered: Any = None
    inputs: Any = None
    compile: Any = None
    layouts: Choice | None = None
    is_new = True
    digest = ""

    def __init__(
        self,
        traced: Traced,
        jaxpr: Any,
        inputs: Inputs,
        outputs: Outputs,
        groups: Groups,
        *,
        residuals: int,
        donates: bool,
        executables: Cache[Any, Any] | None,
        options: dict[str, Any] | None,
        lays_out: bool = False,
        in_blocks: bool = False,
    ) -> None:
        self.lowering = Pinning()
        frame = traced.frame
        with jax.enable_x64(True):
            jaxpr = casts_outside(jaxpr)
        shardings = [sharding_of(outputs.forms[i], frame) for i in outputs.order]
        shardings += [None] * residuals
        are_any = any(s is not None for s in shardings)
        jit_options: dict[str, Any] = {"out_shardings": shardings} if are_any else {}
        if frame is not None and any(form.memory for form in outputs.forms):
            jit_options["in_shardings"] = shardings_of(groups, frame.replicated)

        # Residuals keep the layouts that the operations' rules give: the backward program reads
        # them so, and the rules know which shardings XLA computes wrongly.
        if lays_out and frame is not None and not residuals:
            jaxpr = self._laid_out(jaxpr, inputs, groups, shardings, frame)

        # The names of the parameters are those of the inputs in the program's text.
        def step(donated: Any, kept: Any, hosts: Any, words: Any) -> list[Any]:
            found = inputs.constants(donated, kept, hosts, words)
            # None: a cotangent, an input of the backward program alone. Nothing here depends on it.
            found = [0 if value is None else value for value in found]
            if in_blocks:
                return blocks.in_blocks(jaxpr, found, frame)
            results: list[Any] = jaxpr_as_fun(ClosedJaxpr(jaxpr, found))()
            return results

        def lower() -> Any:
            with self.lowering():
                # Another function each time, or JAX would give the same text again.
                function = functools.partial(step)
                donated = 0 if donates else ()
                return jax.jit(function, donate_argnums=donated, **jit_options).lower(*groups)

        with jax.enable_x64(True):
            wanted = [sharding_of(form, frame) for form in outputs.forms]
            self.lowering.loosen(jaxpr, frame, groups, wanted)
            lowered = lower()
            if executables is None:
                self.jaxpr, self.lowered = jaxpr, lowered
                self.inputs = layouts(groups)
                self.compile = functools.partial(self._compile, lowered, lower)
                return
            devices = None if frame is None else tuple(frame.device_ids)
            text, names = text_of(lowered)
            # A trace that came to the same program (the step's Python found state in place that an
            # earlier trace made) costs no compilation. The text doesn't say on which devices.
            key = text, devices, lowered.in_tree, layouts(groups)
            known = executables.get(key)
            self.digest, self.is_new = text[:16], known is None
            if known is None:
                self._agree_to_compile(traced, len(jaxpr.eqns))
                with kept_by_names(names):
                    known = self._compile(lowered, lower, options)
                executables.put(key, known)
                if traced.frame is not None:
                    # Compilers take their time, and transports give up on who comes half a minute
                    # later than the others to the first collective that they have together.
                    agreement.meet(f"has compiled the step with the digest {self.digest}")
            self.compiled = known

    def _laid_out(
        self, jaxpr: Any, inputs: Inputs, groups: Groups, shardings: list[Any], frame: Frame
    ) -> Any:
        """The jaxpr with its values where it communicates least (`layouts/`)."""
        with jax.enable_x64(True):
            memory = memory_of(frame.jax_mesh.devices.flat[0])
            given = inputs.shardings(groups), shardings, inputs.are_arguments, frame, memory
            choices = [
                (choose_for(each, *given), each)
                for each in kept_apart(jaxpr, [*frame.sizes.values()])
            ]
            self.layouts, jaxpr = min(choices, key=lambda found: found[0].price())
            return constrained(jaxpr, self.layouts, frame)

    def _agree_to_compile(self, traced: Traced, operations: int) -> None:
        """See that all processes compile the same."""
        if traced.frame is not None:
            draws = traced.outputs.random_operations
            seed = f" with the seed {rng.default.seed}" if draws else ""
            agreement.agree(
                f"compiles a step of {operations} operations (digest {self.digest}) "
                f"on {traced.frame}{seed}"
            )

    def _compile(self, lowered: Any, lower: Callable[[], Any], options: Any) -> Any:
        return compile_somehow(lambda: lowered, lower, options, self.lowering)


def sharding_of(form: Form, frame: Any) -> Any:
    """The sharding of an output; of one that has none, replicated over the program's devices."""
    if form.sharding is not None or frame is None:
        return form.sharding
    return frame.replicated
