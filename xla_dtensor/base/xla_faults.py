"""The faults of XLA's partitioner and compilers that the package keeps from its users.

One row says what is wrong, when, what is done instead, and which test of plain JAX shows that it is
still so: such a test is expected to fail (``strict``), so when XLA mends the fault it says that the
row, and what the row names, can go. Faults that end the process, or need devices that aren't here,
say so in place of a test.

Who has to choose asks here: which pins an operation gets (`pinned`), from how many axes and dims on
values go by way of others (`MOVES`), for which platforms a function is another (`Fault.platforms`).
Where a lowering is always another one, the row is the reason for it.
"""

from __future__ import annotations

import sys
from collections.abc import Set
from dataclasses import dataclass

from xla_dtensor.base.strictness import ALWAYS, HOLD, OFFER, PIN, PIN_BATCHES, Pinned

ANY = sys.maxsize
_MISCOMPILE = "tests/compilation/test_xla_miscompile.py::"
_HERE = "tests/base/test_xla_faults.py::"


@dataclass(frozen=True)
class Fault:
    """A fault of XLA.

    Attributes:
        what: what it does, in a sentence.
        remedy: the file, and what in it, that does it otherwise.
        proof: the test of plain JAX that shows it, or why there is none.
        kinds: of operations that have it, as `lowering/kinds.py:Kind` calls them; empty for all.
        axes: the least and most mesh axes (of more than one device).
        dims: the least dims of a tensor.
        summed: only of tensors that are parts of a sum.
        platforms: JAX's names of the backends that have it; empty for all.
        pinned: the remedy is to ask for shardings.
    """

    what: str
    remedy: str
    proof: str
    kinds: tuple[str, ...] = ()
    axes: tuple[int, int] = (1, ANY)
    dims: int = 0
    summed: bool = False
    platforms: tuple[str, ...] = ()
    pinned: Pinned | None = None


# --- the partitioner, which all backends share: shardings that it must be told --------------------

_PINS = "plans/result_placements.py:pins"

CONVOLUTIONS = Fault(
    "Convolutions over sharded positions have wrong numbers, weight gradients above all.",
    _PINS,
    _HERE + "test_convolutions",
    kinds=("CONVOLUTION",),
    # [batch or out channels, in channels, positions...]
    pinned=Pinned(ALWAYS, ALWAYS, out=ALWAYS, dims=2),
)
TRANSFORMS = Fault(
    "A Fourier transform along a sharded dim doesn't compile, or ends the process.",
    _PINS,
    _HERE + "test_transforms",
    kinds=("TRANSFORM",),
    pinned=Pinned(ALWAYS, ALWAYS, out=ALWAYS),
)
SUMMED_GATHERS = Fault(
    "Gathers whose indices are sharded by one axis, with a sum (here: the same) on another, don't "
    "compile (Slice dim size 3 greater than dynamic slice dimension: 2).",
    _PINS,
    "seen in compiled steps alone: tests/lowering/test_partitioning.py",
    kinds=("GATHER",),
    summed=True,
    pinned=Pinned(ALWAYS, ALWAYS, out=ALWAYS),
)
BATCHES = Fault(
    "On two axes of different sizes a product in batches has the wrong batches if its result is "
    "wanted with the contraction's axis on the batch dim, and the batch's elsewhere.",
    _PINS,
    _MISCOMPILE + "test_xla_itself_on_two_axes",
    kinds=("BATCHED",),
    axes=(2, 2),
    # Where it is written to it need not lie as the product does by itself.
    pinned=Pinned(HOLD, OFFER, out=PIN, in_place=PIN),
)
ADDED_BATCHES = Fault(
    "The same of a product that is added to something in the same operation: the product, which "
    "isn't a result then, is wanted as that lies.",
    _PINS,
    _MISCOMPILE + "test_xla_itself_on_two_axes",
    kinds=("ADDED",),
    axes=(2, 2),
    pinned=Pinned(HOLD, HOLD, out=PIN, in_place=PIN),
)
UNCOMPILED = Fault(
    "Some programs with products and gathers on two axes don't compile (Cannot infer shape for dot "
    "operation) unless all of these are as their rules say.",
    "compilation/program/input_layouts.py:Pinning.attempt",
    "seen in programs of several operations alone: tests/compilation/random_products.py",
    kinds=("PRODUCT", "GATHER"),
    axes=(2, 2),
    pinned=Pinned(OFFER, OFFER, in_place=OFFER),
)
BATCHES_IN_SPACE = Fault(
    "Products in batches have both faults of products on three axes and of batches on two, which "
    "is what a program has that takes no axes apart.",
    _PINS,
    _MISCOMPILE + "test_xla_itself",
    kinds=("BATCHED",),
    axes=(3, ANY),
    pinned=Pinned(PIN_BATCHES, PIN, out=PIN),
)
PRODUCTS = Fault(
    "On three axes the blocks of a product or gather are computed in one device order and labelled "
    "in another. Never, in thousands of random cases, with operands and result pinned to one "
    "assignment of axes, which is what a rule gives; nor in a step that takes no axes apart.",
    _PINS,
    _MISCOMPILE + "test_xla_itself",
    kinds=("PRODUCT", "GATHER"),
    axes=(3, ANY),
    pinned=Pinned(PIN, PIN, out=PIN),
)
MOVES = Fault(
    "Where two or more axes of three go from dims of a tensor of four to others at once, the "
    "partitioner may divide by zero, which ends the process. Left to itself it may bring any "
    "operand of an operation to any other's place.",
    "mesh/intermediate.py:intermediate_shardings",
    "it ends the process, with 12 or 16 devices",
    axes=(3, ANY),
    dims=4,
    pinned=Pinned(PIN, PIN, moving=True),
)

PINNED = (
    CONVOLUTIONS,
    TRANSFORMS,
    SUMMED_GATHERS,
    ADDED_BATCHES,
    BATCHES,
    UNCOMPILED,
    BATCHES_IN_SPACE,
    PRODUCTS,
    MOVES,
)
"""In order: the first that applies decides."""


def pinned(kinds: Set[str], axes: int, dims: int, summed: bool) -> Pinned | None:
    """How shardings are asked for around an operation; None if XLA needn't be told.

    Args:
        kinds: the operation's, by name.
        axes: of the mesh, of more than one device.
        dims: the most that one of its tensors has.
        summed: whether one of its tensors is parts of a sum.
    """
    for fault in PINNED:
        least, most = fault.axes
        concerned = not fault.kinds or not kinds.isdisjoint(fault.kinds)
        enough = least <= axes <= most and dims >= fault.dims
        if concerned and enough and (summed or not fault.summed):
            return fault.pinned
    return None


# --- the partitioner: what is lowered otherwise, or hidden from it --------------------------------

PASSED_ON_FIRST = Fault(
    "A gather at positions along several dims (`x[:, i, j]`, a diagonal) whose result begins with "
    "dims that it passes on reads other elements where the passed-on dim is wanted over the axis "
    "that a gathered dim of the operand lies over.",
    "lowering/partitioned/gather.py:read_at",
    _HERE + "test_gathers_that_begin_with_dims_passed_on",
)
STRIDES = Fault(
    "Padding between elements, as in the gradient of a strided slice, gives shards copies of their "
    "neighbours or doesn't compile; nor does a strided slice of one element.",
    "lowering/partitioned/strided.py:strided_slice",
    _HERE + "test_padding_between_elements",
)
BATCHED_SCATTERS = Fault(
    "A scatter along one dim in batches over others has wrong numbers.",
    "lowering/partitioned/scatter.py:write_each",
    "random cases: tests/lowering/test_partitioning.py",
)
UNEVEN_SCATTERS = Fault(
    "What pads index tensors that are sharded unevenly writes, too: anything to position 0.",
    "lowering/partitioned/scatter.py:write",
    _HERE + "test_scatters_of_uneven_shards",
)
SHORT_SCATTERS = Fault(
    "Where a dim of 2 of a scatter's updates is sharded over 4 devices, all but one of them lose "
    "what was there before.",
    "lowering/partitioned/scatter.py:write",
    _HERE + "test_scatters_shorter_than_an_axis",
)
MOVED_SCATTERS = Fault(
    "A scatter to one position becomes a dynamic-update-slice whose position is out of range on "
    "all devices but one, and which writes back what it has read there; of a slice of something it "
    "then reads at the sum of both positions, which isn't where it writes: other rows come in.",
    "lowering/partitioned/scatter.py:write",
    _HERE + "test_scatters_to_one_position_of_what_moves",
)
SINGLE_SCATTERS = Fault(
    "A scatter to one position doesn't compile (RET_CHECK ... broadcast) if a coordinate of it is "
    "cut out of a sharded index: the cut's sharding lands on the dim that has the coordinates.",
    "lowering/partitioned/scatter.py:write",
    _HERE + "test_scatters_to_one_position",
)
COMPLEX_SCATTERS = Fault(
    "A scatter that has to pad a complex operand ends the process.",
    "lowering/partitioned/scatter.py:write",
    "it ends the process",
)
WINDOWS = Fault(
    "The scatter that transposing `unfold` gives ends the process in some layouts.",
    "lowering/views/strided.py:over_each_position",
    "it ends the process",
)
WINDOW_PADDING = Fault(
    "Of two reduce_windows over one sharded operand the second one gets the padding of the first: "
    "a running maximum beside a running sum takes zeros for numbers.",
    "lowering/partitioned/scans.py:scan",
    _HERE + "test_windows_beside_each_other",
)
CONSTANT_WINDOWS = Fault(
    "A running sum of what one number was repeated to ends the process.",
    "lowering/partitioned/scans.py:scan",
    "it ends the process",
)
CROPS = Fault(
    "Pads of negative width give shards the values of their neighbours, or end the process.",
    "lowering/partitioned/padding.py:padded",
    _HERE + "test_crops",
)
SLICED_PADDING = Fault(
    "A slice of a pad becomes one pad, which is wrong, or ends the process, if nothing but padding "
    "is in it.",
    "lowering/partitioned/padding.py:padded",
    _HERE + "test_slices_of_padding",
)
GROUPED_PRODUCTS = Fault(
    "A convolution with groups that is a product, of kernels with one position or as many as there "
    "are, loses its groups where channels are sharded.",
    "lowering/nn/convolution.py:_grouped_product",
    _HERE + "test_grouped_products",
)
ONLY_PADDING = Fault(
    "A convolution of a dilated image one wide, by two positions of which one meets only padding, "
    "ends the process: the gradient of `conv2d` of stride 2, kernel 2, padding 1, on one device.",
    "lowering/nn/convolution.py:_taps",
    "it ends the process; programs: tests/lowering/test_convolution.py",
)
GROUPED_WEIGHTS = Fault(
    "The gradient of a grouped convolution's weight, a convolution with groups of the batch, "
    "counts shards of the batch several times.",
    "lowering/nn/convolution.py:_grouped_weight_grad",
    _HERE + "test_gradients_of_grouped_weights",
)
LOST_ORDERS = Fault(
    "Of a value that a broadcast has made (`x.repeat(2, 1)`), sharded over axes a and b of one dim "
    "and asked for over b alone, it gathers over a and takes the rows for those of b.",
    "movement/relayout.py:_held",
    _HERE + "test_the_order_of_axes",
)
PADDED_OPERANDS = Fault(
    "Behind a padded operand of a call on shards it sees the one that isn't, and mixes up their "
    "shapes (Expected instruction to have shape equal to ...).",
    "plans/shard_map_call.py:ShardMapCall",
    "seen in programs of several operations alone: tests/dispatch/test_sliced.py",
)
UNEVEN_SPLITS = Fault(
    "A reshape of uneven shards into other uneven shards ends the process (a segmentation fault "
    "while it compiles): four elements over eight devices as two rows over them.",
    "forms/views.py:_whole_in",
    "it ends the process; programs: tests/forms/test_uneven_splits.py",
)
CUT_PADDING = Fault(
    "A tensor and what is cut from its front (`x[:3]` of four elements in shards of two) are one "
    "to it where their shards have one shape: wanted in another layout, both get what the first "
    "of them was brought there as. A result has other elements than its shape says, or the program "
    "doesn't compile (Expected instruction to have shape equal to ...). What is cut out of padding "
    "`compilation/program/input_layouts.py:apart` hides where XLA has failed.",
    "lowering/partitioned/cut.py:cut",
    _HERE + "test_cuts_that_look_whole",
)
MASKS = Fault(
    "A product with a bool that has become a float is made a selection, which gives 0 for NaN and "
    "infinity behind a 0; on one device, too.",
    "lowering/promotion.py:converted",
    _HERE + "test_products_with_masks",
)

# --- one backend's compiler (`lowering/workarounds.py`) -------------------------------------------

_WORKAROUND = "lowering/workarounds.py:Workaround"
_TPU = "it needs a TPU's compiler"
_GPU = "it needs a GPU"

ROW_MAJOR_TRANSFORMS = Fault(
    "The layout of a Fourier transform is left open, and the CPU's kernel refuses what layout "
    "assignment then chooses. The TPU's compiler has no layout constraints on complex numbers.",
    _WORKAROUND,
    _HERE + "test_layouts_of_transforms",
    platforms=("cpu",),
)
NORMAL_IN_DOUBLE = Fault(
    "Single-precision erf_inv rounds differently in the CPU's vectorised and scalar loops, so that "
    "a random number would depend on the tensor's layout.",
    _WORKAROUND,
    "which processors do is not known: tests/lowering/test_random.py",
    platforms=("cpu",),
)
FACTORISATIONS_IN_32_BITS = Fault(
    "JAX writes the TPU's singular values, and eigenvalues of large matrices, as loops that carry "
    "a 64-bit number if 64-bit types are on, and libtpu can't rewrite those.",
    _WORKAROUND,
    _TPU,
    platforms=("tpu",),
)
RAGGED_PRODUCTS = Fault(
    "JAX takes the CPU's ragged products apart into one of all rows per group.",
    _WORKAROUND,
    "it is slow, not wrong",
    platforms=("cpu",),
)
PRODUCTS_OF_BYTES = Fault(
    "A product of int8 matrices into int32 is twice what it is where XLA's GPU compiler leaves it "
    "to no library: of odd sizes, and of all without autotuning (JAX 0.11.2, H200, 2026-11-27).",
    "lowering/linalg/matmul.py:dot",
    _GPU,
    platforms=("cuda",),
)
EXCESS_PRECISION = Fault(
    "XLA's GPU compiler leaves out a rounding to 16 or 8 bits that is followed by a conversion "
    "back, so ``x.bfloat16().float()`` is ``x`` (JAX 0.11.2, H200, 2026-11-27).",
    "runtime/xla_flags.py:ROUNDED",
    _GPU,
    platforms=("cuda",),
)
MANY_RAGGED_PRODUCTS = Fault(
    "As RAGGED_PRODUCTS; and of 16 groups in float32 the TPU's compiler runs out of its cores' "
    "memory (libtpu 0.0.52).",
    _WORKAROUND,
    _TPU,
    platforms=("cpu", "tpu"),
)
IN_FLIGHT = Fault(
    "In several processes a program on one of a process's devices isn't kept in order with those "
    "on several of them, and Gloo tells messages apart by nothing but their order: collectives of "
    "the same devices get each other's numbers, or end the process where sizes differ. (Users' "
    "meshes have all devices, where there are several processes.)",
    "runtime/broadcast.py:_rows",
    "tests/runtime/test_in_flight.py::test_by_jax_alone",
    platforms=("cpu",),
)
LOST_NANS = Fault(
    "What devices found is brought together by a maximum (a minimum) that leaves out NaNs.",
    "lowering/partitioned/extremes.py:greatest",
    _HERE + "test_nans_in_extremes",
)
WRONG_ADDRESSES = Fault(
    "LLVM's loop strength reduction makes a large fused loop of the CPU's backend (of a dozen "
    "operands and more, written to a position and padded) read other elements than it should.",
    "runtime/xla_flags.py:LLVM_ON_CPUS",
    _HERE + "test_addresses_in_large_loops",
    platforms=("cpu",),
)
SUMS_IN_FLOAT32 = Fault(
    "The CPU's backend adds up what devices have of 16-bit numbers in 32 bits, so that a product "
    "which gives float32 moves no more there, and depends less on how many devices share it.",
    _WORKAROUND,
    "it is slow, not wrong",
    platforms=("cpu",),
)
SCATTERED_COLUMNS = Fault(
    "The TPU's compiler gives each device all of a sum of 16-bit numbers of which the device then "
    "keeps 128 columns. Of any other width it makes a reduce-scatter.",
    _WORKAROUND,
    _TPU,
    platforms=("tpu",),
)

FAULTS = {name: value for name, value in globals().items() if isinstance(value, Fault)}
"""All rows by name."""
