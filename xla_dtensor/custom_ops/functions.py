"""`DFunction`: an autograd function that runs on sharded tensors too."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from xla_dtensor.base import thread_state
from xla_dtensor.custom_ops.call import call, sharded_tensors
from xla_dtensor.custom_ops.distributed_op import find_op
from xla_dtensor.errors import UnsupportedOpError


class _Running(threading.local):
    keywords: dict[str, Any] | None = None
    """Keyword-only arguments on their way from ``apply`` to ``forward``: torch's ``apply`` passes
    positional ones alone."""


_running = _Running()


class DFunction(torch.autograd.Function):
    """A ``torch.autograd.Function`` that also takes sharded tensors.

    On plain tensors ``apply`` is torch's. With a sharded tensor among its arguments, the
    `DistributedOp` registered under ``_op_name`` says how the results are laid out, ``forward`` and
    ``backward`` run on what each device holds (per-device tensors), and the results are sharded
    tensors. What the devices contribute to the gradient of something that they share is summed.

    The semantics are those of HyperParallel's class of this name. ``apply`` takes keyword
    arguments as well: those of parameters that ``forward`` also takes by position are passed by
    position (``backward`` returns a gradient for each), keyword-only ones get no gradient.

    Attributes:
        _op_name: the name of its `DistributedOp`; needed for sharded tensors alone.
        view: "local", or "global": then ``forward`` and ``backward`` see the sharded tensors
            themselves, with single-device semantics, and the rule says how the results are laid
            out and nothing else.

    Example::

        import torch, xla_dtensor as xd

        class Scale(xd.DFunction):
            _op_name = "Scale"

            @staticmethod
            def forward(ctx, x, scale):
                ctx.scale = scale
                return x * scale

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.scale, None

        xd.DistributedOp("Scale", rule="... -> ...")
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        x = xd.distribute_tensor(torch.ones(8, 4), mesh, [xd.Shard(0)]).requires_grad_()
        y = Scale.apply(x, 3.0)
        y.sum().backward()
        assert y.placements == (xd.Shard(0),) and x.grad.full_tensor().cpu()[0, 0] == 3
    """

    _op_name: ClassVar[str | None] = None
    view: ClassVar[str] = "local"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("forward", "backward", "vjp"):
            method = cls.__dict__.get(name)
            if isinstance(method, staticmethod):
                takes_keywords = name == "forward"
                setattr(cls, name, staticmethod(_marked(method.__func__, cls, takes_keywords)))

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the function; the results are sharded tensors if any argument is.

        Args:
            args, kwargs: those of ``forward`` behind ``ctx``.

        Returns:
            what ``forward`` returns; for per-device tensors in it sharded tensors with the layouts
            that the op's rule says, if any argument is a sharded tensor.

        Raises:
            LayoutRuleError: sharded tensors, and no op is registered under ``_op_name``; or the
                op's rule contradicts the arguments or the results.
            UnsupportedOpError: called with sharded tensors from a ``forward`` or ``backward``.
            TypeError: arguments that ``forward`` doesn't take, or a tensor that requires grad
                inside a list or dict, where autograd doesn't see it.

        Example::

            import torch, xla_dtensor as xd

            class Square(xd.DFunction):
                @staticmethod
                def forward(ctx, x):
                    return x * x

            assert Square.apply(torch.full((2,), 3.0)).tolist() == [9, 9]  # torch's, without an op
        """
        sharded = sharded_tensors(args, kwargs)
        if not sharded:
            return cls._plain(*args, **kwargs)
        inside = thread_state.function()
        if inside is not None:
            raise UnsupportedOpError(
                f"{cls.__qualname__}.apply got a sharded tensor of shape {list(sharded[0].shape)} "
                f"inside {inside}: what forward and backward call works on per-device "
                "tensors (x.to_local()); combine DFunctions outside of them"
            )
        if cls.view not in ("local", "global"):
            raise ValueError(f'{cls.__qualname__}.view is "local" or "global", not {cls.view!r}')
        _refuse_lost_gradients(cls, args, kwargs)
        op = find_op(cls, cls._op_name)
        return call(op, cls._plain, cls._bind, args, kwargs, cls.view)

    @classmethod
    def _plain(cls, *args: Any, **kwargs: Any) -> Any:
        """torch's ``apply``."""
        args, kwargs = cls._bind(args, kwargs)
        outer, _running.keywords = _running.keywords, kwargs or None
        try:
            return super().apply(*args)
        finally:
            _running.keywords = outer

    @classmethod
    def _bind(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _by_position(cls, args, kwargs) if kwargs else (args, kwargs)


def _marked(function: Callable[..., Any], cls: type, takes_keywords: bool) -> Callable[..., Any]:
    """``function`` with the thread knowing that it runs."""
    where = f"{cls.__qualname__}.{function.__name__}"

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        keywords = None
        if takes_keywords:
            # Taken out: a function that this one's forward calls must not find them.
            keywords, _running.keywords = _running.keywords, None
        with thread_state.inside_function(where):
            return function(*args, **(keywords or {}))

    return run


def _by_position(
    cls: type[DFunction], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with as many of them by position as ``forward`` allows, and the others."""
    parameters = list(inspect.signature(cls.forward).parameters.values())
    if cls.setup_context is torch.autograd.Function.setup_context:
        parameters = parameters[1:]  # ctx
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    values, rest = list(args), dict(kwargs)
    for parameter in positional[len(args) :]:
        if not any(p.name in rest for p in positional[len(values) :]):
            break
        if parameter.name in rest:
            values.append(rest.pop(parameter.name))
        elif parameter.default is not parameter.empty:
            values.append(parameter.default)
        else:
            raise TypeError(
                f"{cls.__qualname__}.forward is missing its argument {parameter.name!r}"
            )
    keyword_only = {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    unknown = [name for name in rest if name not in keyword_only]
    if unknown and not takes_any:
        raise TypeError(
            f"{cls.__qualname__}.forward got an unexpected keyword argument {unknown[0]!r}, or one "
            "that was given by position"
        )
    for name, value in rest.items():
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{cls.__qualname__}: {name!r} is keyword-only and requires grad, but autograd "
                "records positional arguments alone; let forward take it by position"
            )
    return tuple(values), rest


def _refuse_lost_gradients(
    cls: type[DFunction], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise for sharded tensors in containers that require grad, which torch doesn't look into."""
    if not torch.is_grad_enabled():
        return
    top = {id(x) for x in (*args, *kwargs.values())}
    for tensor in sharded_tensors(args, kwargs):
        if id(tensor) not in top and tensor.requires_grad:
            raise TypeError(
                f"{cls.__qualname__}.apply got a tensor of shape {list(tensor.shape)} that "
                "requires grad inside a list or dict, where autograd doesn't see it; pass it as an "
                "argument of its own"
            )
