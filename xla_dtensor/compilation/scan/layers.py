"""``xd.scan_layers``: equal layers as one loop of a compiled step.

Given layers (`loop.py`), or found in what a block calls (`equal.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, overload

from torch import nn

from xla_dtensor.compilation.scan.equal import AT_LEAST, scan_equal_layers
from xla_dtensor.compilation.scan.loop import loop_of


@overload
def scan_layers(
    layers: Iterable[nn.Module], *, recompute: bool | None = None, offload: bool = False
) -> Callable[..., Any]: ...


@overload
def scan_layers(
    layers: None = None,
    *,
    recompute: bool | None = None,
    offload: bool = False,
    at_least: int | None = None,
) -> AbstractContextManager[None]: ...


def scan_layers(
    layers: Iterable[nn.Module] | None = None,
    *,
    recompute: bool | None = None,
    offload: bool = False,
    at_least: int | None = None,
) -> Callable[..., Any] | AbstractContextManager[None]:
    """Equal layers as one loop of a compiled step: what is traced, lowered and compiled is one
    layer, whatever their number. Losses and gradients are those of the layers one by one.

    ``xd.scan_layers(layers)`` is a function that runs these layers. ``with xd.scan_layers():`` is
    for models as they are: in the block, equal layers of an ``nn.ModuleList`` or ``nn.Sequential``
    that a module calls one after the other become a loop. Those that aren't equal, or can't be a
    loop, or are called in another way, run as they are; the logger ``xla_dtensor`` says why, at the
    level INFO, and where layers are computed in vain, WARNING. Outside of compiled steps both run
    the layers one by one.

    Args:
        layers: modules of equal structure: classes, attributes, and the shapes, dtypes and layouts
            of parameters and buffers (an ``nn.ModuleList``, say). Each takes what the one before
            gives, and further arguments, the same for all. None: those that a block calls.
        recompute: in the step each layer's forward runs again in backward, as under
            ``torch.utils.checkpoint``, and the step keeps each layer's input alone. False: it keeps
            all that autograd saves. Default: True for given layers, False in a block, which changes
            nothing that the model does.
        offload: what the step keeps is in the host's memory between forward and backward.
        at_least: in a block, how many equal layers are worth a loop; 4 by default.

    Returns:
        of ``layers``, a function of the first layer's input and the further arguments, which
        returns the last layer's output, a tensor of the input's shape and dtype; without, the
        context of a block.

    Raises:
        ValueError: ``at_least`` is less than 2, or given with ``layers``.
        UnsupportedOpError: (when called in a compiled step) the layers differ, or give another
            shape than they take, or write to what isn't theirs alone (a ``BatchNorm``), or assign
            attributes; ``offload`` on devices that reach no memory of the host; in backward: they
            read what needs a gradient and is neither theirs nor an argument, or have changed since
            forward. In a block: layers draw random numbers, and so does the model between two.

    Example::

        import torch, xla_dtensor as xd

        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8))).to("xla")
        x = torch.ones(2, 4, device="xla")
        given = xd.compile(lambda x: xd.scan_layers(model)(x).sum())
        @xd.compile
        def found(x):
            with xd.scan_layers():
                return model(x).sum()
        assert torch.allclose(given(x).cpu(), model(x).sum().cpu())
        assert "stablehlo.while" in found.lower(x).as_text()
    """
    if layers is None:
        return scan_equal_layers(
            at_least=AT_LEAST if at_least is None else at_least,
            recompute=bool(recompute),
            offload=offload,
        )
    if at_least is not None:
        raise ValueError(
            f"scan_layers(layers, at_least={at_least}): it is for a block, with "
            "xd.scan_layers(at_least=...):, which looks for layers; those that are given are a loop"
        )
    return loop_of(layers, recompute=recompute is not False, offload=offload)
