"""Fourier transforms, whose results are read as pairs of real numbers, without kinks."""

from __future__ import annotations

import torch

from tests.fuzz.draw import Draw, operation

_NORMS = ["", "", ", norm='ortho'", ", norm='forward'"]


def _real(t: torch.Tensor) -> bool:
    return t.dtype == torch.float32 and t.ndim >= 1 and t.numel() > 0


def _length(d: Draw, size: int) -> int | None:
    """Of a transform: a dim's, one that cuts it, or one that pads it."""
    return None if d.chance(0.6) else d.choice([max(1, size - 2), size + 1, size + 3])


@operation(0.7)
def transform(d: Draw) -> None:
    name = d.pick(_real)
    dim = d.dim(name)
    n = _length(d, d.true[name].shape[dim])
    how = f"n={n}, dim={dim}{d.choice(_NORMS)}"
    kind = d.choice(["fft", "ifft", "rfft", "ihfft"])
    d.let(f"torch.view_as_real(torch.fft.{kind}({name}, {how}))")


@operation(0.5)
def transform_back(d: Draw) -> None:
    """From half a spectrum, or a whole one, to real numbers."""
    name = d.pick(lambda t: _real(t) and t.ndim >= 2 and t.shape[-1] == 2)
    spectrum = f"torch.view_as_complex({name}.contiguous())"
    dim = d.choice(range(d.true[name].ndim - 1))
    kind = d.choice(["irfft", "hfft", "fft"])
    n = _length(d, d.true[name].shape[dim])
    result = f"torch.fft.{kind}({spectrum}, n={n}, dim={dim}{d.choice(_NORMS)})"
    d.let(f"torch.view_as_real({result})" if kind == "fft" else result)


@operation(0.5)
def transform_of_several_dims(d: Draw) -> None:
    name = d.pick(lambda t: _real(t) and t.ndim >= 2)
    dims = sorted(d.rng.sample(range(d.true[name].ndim), 2))
    how = f"dim={dims}{d.choice(_NORMS)}"
    kind = d.choice(["fftn", "ifftn", "rfftn"])
    if d.chance(0.3):
        sizes = [d.true[name].shape[dim] for dim in dims]
        d.let(f"torch.fft.irfftn(torch.fft.rfftn({name}, {how}), s={sizes}, {how})")
    else:
        d.let(f"torch.view_as_real(torch.fft.{kind}({name}, {how}))")
