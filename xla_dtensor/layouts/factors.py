"""Factors: which dims of an equation's operands and results a mesh axis can shard together.

Each device then computes its part without asking the others.

A `Factor` is such a set of dims. Those of an einsum are its letters: ``b m k, b k n -> b m n`` has
four, of which ``k`` leaves each device with a part of a sum. Shardy calls them so, too, in its
sharding rules (openxla.org/shardy). An equation without a factor for an axis computes the same on
all devices along it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SUM = -1
"""In place of a result's dim: each device has a part of it, which has to be reduced."""


@dataclass(frozen=True)
class Factor:
    """Dims that an axis may shard together.

    Attributes:
        operands: of operands, by their number, the dim; others are whole.
        results: of results likewise, or `SUM`.
        exchanges: how many positions along the dim of the first result devices need of what others
            have; infinite if all that each has.
        behind_operand, behind_result: of a reshape of several dims to one, or of one to several,
            which of the several have to be cut, each to length 1 and by axes before this one, so
            that this one may cut the next.
        work: how many times as much all devices together compute then.
    """

    operands: Mapping[int, int] = field(default_factory=dict)
    results: Mapping[int, int] = field(default_factory=dict)
    exchanges: float = 0.0
    behind_operand: tuple[int, ...] = ()
    behind_result: tuple[int, ...] = ()
    work: float = 1.0


Factors = Callable[[Any], "list[Factor]"]
_FACTORS: dict[str, Factors] = {}


def factors(equation: Any) -> list[Factor] | None:
    """The factors of an equation; None of a primitive that isn't in the table."""
    find = _FACTORS.get(equation.primitive.name)
    return None if find is None else find(equation)


def is_elementwise(equation: Any) -> bool:
    """Whether each element of the results is computed of the operands' elements at its place."""
    return equation.primitive.name in _ELEMENTWISE


def _of(*names: str) -> Callable[[Factors], Factors]:
    def register(find: Factors) -> Factors:
        for name in names:
            _FACTORS[name] = find
        return find

    return register


def shape_of(variable: Any) -> tuple[int, ...]:
    """Of a variable or a literal."""
    return tuple(variable.aval.shape)


_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp
    exp2 expm1 floor ge gt imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt
    lt_to max min mul ne neg nextafter not one_minus_square or pin polynomial pow real
    reduce_precision rem reshard round rsqrt scattered select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())


def of_broadcast(operand: Sequence[int], result: Sequence[int]) -> list[Factor]:
    """Factors of an operand of an elementwise equation, some dims of which have length 1."""
    return [
        Factor({0: d} if own == size else {}, {0: d})
        for d, (own, size) in enumerate(zip(operand, result, strict=True))
        if size > 1
    ]


@_of("transpose")
def _transpose(equation: Any) -> list[Factor]:
    return [Factor({0: own}, {0: d}) for d, own in enumerate(equation.params["permutation"])]


@_of("broadcast_in_dim")
def _broadcast_in_dim(equation: Any) -> list[Factor]:
    shape, own = shape_of(equation.outvars[0]), shape_of(equation.invars[0])
    of = {d: i for i, d in enumerate(equation.params["broadcast_dimensions"])}
    return [
        Factor({0: of[d]} if d in of and own[of[d]] == size else {}, {0: d})
        for d, size in enumerate(shape)
        if size > 1
    ]


@_of("reshape", "squeeze", "expand_dims")
def _reshape(equation: Any) -> list[Factor]:
    found = []
    for before, after in reshaped_dims(shape_of(equation.invars[0]), shape_of(equation.outvars[0])):
        found.append(Factor({0: before[0]}, {0: after[0]}))
        if len(before) == 1:
            for i, d in enumerate(after[1:], 1):
                found.append(Factor({0: before[0]}, {0: d}, behind_result=after[:i]))
        elif len(after) == 1:
            for i, d in enumerate(before[1:], 1):
                found.append(Factor({0: d}, {0: after[0]}, behind_operand=before[:i]))
    return found


Dims = tuple[int, ...]


def reshaped_dims(before: Sequence[int], after: Sequence[int]) -> list[tuple[Dims, Dims]]:
    """The dims of a reshape that become others, those of length 1 left out. Of each such group the
    first dims keep what each of several devices has, if they are sharded."""
    found = []
    i = j = 0
    while i < len(before) and j < len(after):
        first, second = i, j
        left, right = before[i], after[j]
        while left != right:
            if left < right:
                i += 1
                left *= before[i]
            else:
                j += 1
                right *= after[j]
        ranges = (before, first, i), (after, second, j)
        one, other = (
            tuple(d for d in range(start, stop + 1) if shape[d] > 1)
            for shape, start, stop in ranges
        )
        if one and other:
            found.append((one, other))
        i, j = i + 1, j + 1
    return found


@_of("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
@_of("argmax", "argmin")  # XLA compares what the shards have found, with the values there
def _reduce(equation: Any) -> list[Factor]:
    kept = _kept(equation)
    return [Factor({0: d}, {0: kept.get(d, SUM)}) for d in range(len(shape_of(equation.invars[0])))]


def _kept(equation: Any) -> dict[int, int]:
    """Where the dims that aren't reduced are in the result."""
    dims = range(len(shape_of(equation.invars[0])))
    kept = [d for d in dims if d not in equation.params["axes"]]
    return {d: i for i, d in enumerate(kept)}


@_of("dot_general")
def _dot_general(equation: Any) -> list[Factor]:
    (left_sums, right_sums), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left, right = equation.invars
    found = [
        Factor({0: a, 1: b}, {0: i})
        for i, (a, b) in enumerate(zip(left_batch, right_batch, strict=True))
    ]
    for number, operand, own in (
        (0, left, (*left_sums, *left_batch)),
        (1, right, (*right_sums, *right_batch)),
    ):
        free = [d for d in range(len(shape_of(operand))) if d not in own]
        found += [Factor({number: d}, {0: i}) for i, d in enumerate(free, len(found))]
    return found + [
        Factor({0: a, 1: b}, {0: SUM}) for a, b in zip(left_sums, right_sums, strict=True)
    ]


@_of("conv_general_dilated")
def _convolution(equation: Any) -> list[Factor]:
    numbers = equation.params["dimension_numbers"]
    x, kernel, result = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if equation.params["batch_group_count"] != 1:
        return []
    found = [Factor({0: x[0]}, {0: result[0]})]
    if equation.params["feature_group_count"] == 1:
        found.append(Factor({1: kernel[0]}, {0: result[1]}))
        found.append(Factor({0: x[1], 1: kernel[1]}, {0: SUM}))
    return found


@_of("gather")
def _gather(equation: Any) -> list[Factor]:
    numbers = equation.params["dimension_numbers"]
    operand, indices = map(shape_of, equation.invars[:2])
    shape = shape_of(equation.outvars[0])
    batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    together = _paired(numbers.start_indices_batching_dims, numbers.operand_batching_dims)
    # The last dim of the indices has their coordinates.
    pairs = zip(range(len(indices) - 1), batch, strict=True)
    found = [Factor({**together.get(i, {}), 1: i}, {0: d}) for i, d in pairs]
    apart = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    sliced = [d for d in range(len(operand)) if d not in apart]
    for d, own in zip(sliced, numbers.offset_dims, strict=True):
        if shape[own] == operand[d]:
            found.append(Factor({0: d}, {0: own}))
    if len(numbers.start_index_map) == 1 and not numbers.operand_batching_dims:
        # Each device looks up the rows that it has.
        found.append(Factor({0: numbers.start_index_map[0]}, {0: SUM}))
    return found


def _paired(of_indices: Sequence[int], of_operand: Sequence[int]) -> dict[int, dict[int, int]]:
    """By batch dims of indices, those of the operand that they go with, as part of a factor."""
    return {i: {0: d} for i, d in zip(of_indices, of_operand, strict=True)}


@_of("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(equation: Any) -> list[Factor]:
    """Whole dims of what is written to; the rows that are added, of which each device may add its
    own, to zeros on all devices but one; and those that they are added to."""
    numbers = equation.params["dimension_numbers"]
    operand, _, updates = map(shape_of, equation.invars)
    rows = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    adds = equation.primitive.name == "scatter-add"
    together = _paired(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims)
    found = []
    for i, d in enumerate(rows):
        if i in together:
            found.append(Factor({**together[i], 1: i, 2: d}, {0: together[i][0]}))
        elif adds:
            found.append(Factor({1: i, 2: d}, {0: SUM}))
    apart = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [d for d in range(len(operand)) if d not in apart]
    for d, own in zip(windows, numbers.update_window_dims, strict=True):
        if updates[own] == operand[d]:
            found.append(Factor({0: d, 2: own}, {0: d}))
    places = numbers.scatter_dims_to_operand_dims
    if adds and len(places) == 1 and places[0] in numbers.inserted_window_dims and not together:
        # Each device adds to the rows that it has.
        found.append(Factor({0: places[0]}, {0: places[0]}))
    return found


@_of("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "prefix_scan", "transform")
@_of("concatenate", "pad", "padded", "rev")
@_of("split", "slice", "dynamic_slice", "strided_slice", "sort", "top_k", "dynamic_update_slice")
def _along_others(equation: Any) -> list[Factor]:
    """Dims that nothing happens along: of one length in all operands and results. And the others
    of what cuts and joins: shards begin elsewhere then."""
    params = equation.params
    active: set[int] = set()
    for name in ("dimension", "axis", "dimensions"):
        value = params.get(name, ())
        active |= set(value) if isinstance(value, Iterable) else {value}
    if equation.primitive.name == "top_k":
        active.add(len(shape_of(equation.invars[0])) - 1)
    edges = params.get("padding_config", params.get("widths", ()))
    active |= {d for d, widths in enumerate(edges) if any(widths)}
    ndim = len(shape_of(equation.outvars[0]))
    operands = {i: v for i, v in enumerate(equation.invars) if shape_of(v)}
    results = dict(enumerate(equation.outvars))
    shapes = [shape_of(v) for v in (*operands.values(), *results.values())]
    if any(len(shape) != ndim for shape in shapes):
        return []
    same = [d for d in range(ndim) if len({shape[d] for shape in shapes}) == 1 and d not in active]
    moving = equation.primitive.name in _MOVING
    return [
        Factor(
            dict.fromkeys(operands, d),
            dict.fromkeys(results, d),
            0.0 if d in same else _shifted(equation, d),
        )
        for d in range(ndim)
        if d in same or moving
    ]


def _shifted(equation: Any, dim: int) -> float:
    """How many positions of a dim may be on another device in what is made of it than before: by so
    many shards begin elsewhere, relative to what they have."""
    params, name = equation.params, equation.primitive.name
    if name in ("pad", "padded"):
        before, after, *between = params.get("padding_config", params.get("widths"))[dim]
        return float("inf") if any(between) else float(max(abs(before), abs(after)))
    length = shape_of(equation.invars[0])[dim]
    if name == "strided_slice":
        step = params["step"]
        return max(params["start"], abs(length - step * params["count"])) / step
    if name == "slice" and (params["strides"] is None or params["strides"][dim] == 1):
        start, limit = params["start_indices"][dim], params["limit_indices"][dim]
        return float(max(start, length - limit))
    return float("inf")


@_of("custom_vmap_call", "custom_partitioning")
def _partitioned(equation: Any) -> list[Factor]:
    """By the rule that the function has for Shardy; that of a function of each slice is in what it
    calls (`lowering/partitioned/per_slice.py`)."""
    rule = _rule(equation)
    if rule is None:
        return []
    shapes = [[shape_of(v) for v in equation.invars], [shape_of(v) for v in equation.outvars]]
    mappings = [rule.operand_mappings, rule.result_mappings]
    if [*map(len, shapes)] != [*map(len, mappings)]:
        return []
    letters = dict.fromkeys(x for mapping in rule.operand_mappings for x in mapping)
    alone = {*rule.need_replication_factors, *rule.permutation_factors}
    found = []
    for letter in letters:
        if not isinstance(letter, str) or letter in alone:
            continue
        operands, results = (
            {
                i: mapping.index(letter)
                for i, (mapping, shape) in enumerate(zip(own, of_own, strict=True))
                if letter in mapping and mapping.index(letter) < len(shape)
            }
            for own, of_own in zip(mappings, shapes, strict=True)
        )
        if letter in rule.reduction_factors:
            results = dict.fromkeys(range(len(equation.outvars)), SUM)
        found.append(Factor(operands, results))
    return found


def _rule(equation: Any) -> Any:
    """The Shardy rule of a function, or of the first that it calls which has one."""
    own = equation.params.get("sharding_rule")
    if equation.primitive.name == "custom_partitioning":
        return own if hasattr(own, "operand_mappings") else None
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            for each in getattr(getattr(inner, "jaxpr", None), "eqns", ()):
                found = _rule(each)
                if found is not None:
                    return found
    return None


_MOVING = ("concatenate", "pad", "padded", "rev", "prefix_scan", "slice", "split", "strided_slice")


@_of("stack")
def _stack(equation: Any) -> list[Factor]:
    new = equation.params["axis"]
    dims = [d for d in range(len(shape_of(equation.outvars[0]))) if d != new]
    operands = range(len(equation.invars))
    return [Factor(dict.fromkeys(operands, i), {0: d}) for i, d in enumerate(dims)]


@_of("cut")
def _cut(equation: Any) -> list[Factor]:
    """As the operation's layout rule has it (`plans/shard_map_call.py`). Causal attention of cut
    queries leaves no keys out, for the last queries' sake: twice the work (and for no kernel)."""
    call, found = equation.params["call"], []
    places = call.tensors_among(equation.params["numbers"], equation.params["keyed"])
    queries, is_causal = len(shape_of(equation.outvars[0])) - 2, call.argument("is_causal")
    for merged in call.alternatives:
        inputs = zip(places, merged.inputs, strict=True)
        operands = {i: p.dim for i, (p,) in inputs if p.is_shard()}
        given = {i: p for i, (p,) in enumerate(merged.outputs) if p.is_partial() or p.is_shard()}
        results = {i: SUM if p.is_partial() else p.dim for i, p in given.items()}
        if not operands and not results:  # a rule may list that, and it isn't a way to cut
            continue
        wasted = 2.0 if is_causal and results.get(0) == queries else 1.0
        found.append(Factor(operands, results, work=wasted))
    return found


@_of("tile")
def _tile(equation: Any) -> list[Factor]:
    return [Factor({0: d}, {0: d}) for d, times in enumerate(equation.params["reps"]) if times == 1]


@_of("random_wrap", "random_unwrap", "random_fold_in", "random_seed")
def _keys(_: Any) -> list[Factor]:
    return []


@_of("iota", "random_bits")
def _iota(equation: Any) -> list[Factor]:
    return [Factor({}, {0: d}) for d in range(len(shape_of(equation.outvars[0])))]
