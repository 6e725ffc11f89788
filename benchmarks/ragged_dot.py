"""What the TPU's compiler makes of `jax.lax.ragged_dot`, by its own estimate of cycles on one chip:
`python benchmarks/ragged_dot.py` (libtpu, and no TPU). No kernel of ours is in it."""

from __future__ import annotations

import argparse
import re

import jax
import jax.numpy as jnp
import numpy as np

import xla_dtensor as xd

CONTRACTED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (0,)), ((), ())),
    lhs_ragged_dimensions=[1],
    rhs_group_dimensions=[],
)


def cycles(
    chip: jax.Device, kind: str, dtype: type, groups: int, rows: int, inner: int, outer: int
) -> int | None:
    """The estimate, of all the program's fusions; None where there is no program for want of
    memory."""
    shapes = {
        "rows": ((rows, inner), (groups, inner, outer)),
        "contracted": ((inner, rows), (rows, outer)),
    }[kind]

    def product(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        wide = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": np.float32}
        if kind == "rows":
            return jax.lax.ragged_dot(x, y, sizes, **wide)
        return jax.lax.ragged_dot_general(x, y, sizes, CONTRACTED, **wide)

    one = jax.sharding.SingleDeviceSharding(chip)
    given = [
        jax.ShapeDtypeStruct(shape, of, sharding=one)
        for shape, of in zip((*shapes, (groups,)), (dtype, dtype, np.int32), strict=True)
    ]
    try:
        text = jax.jit(product).lower(*given).compile().as_text()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" not in str(error):
            raise
        return None
    return sum(int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8, 16, 64, 128])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--outer", type=int, default=1024)
    given = parser.parse_args()
    sizes = given.rows, given.inner, given.outer
    print("| groups |", " | ".join(map(str, given.groups)), "|")
    print("|---|" + "---:|" * len(given.groups))
    with xd.abstract("v5e:2x4") as there:
        chip = there.topology.devices[0]
        for dtype in (jnp.bfloat16, jnp.float32):
            for kind in ("rows", "contracted"):
                found = [cycles(chip, kind, dtype, groups, *sizes) for groups in given.groups]
                cells = ["out of memory" if n is None else f"{n / 1e6:.1f} M" for n in found]
                print(f"| {kind}, {dtype.__name__} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
