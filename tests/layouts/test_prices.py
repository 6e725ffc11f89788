"""What moves along several axes costs what XLA moves for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.base.strictness import PIN
from xla_dtensor.layouts.choice import Choice
from xla_dtensor.layouts.choose import choices
from xla_dtensor.layouts.prices import (
    BY_BYTES,
    BY_TIME,
    COMPILED_FOR_GPUS,
    COMPILED_FOR_TPUS,
    Prices,
)
from xla_dtensor.planning.collectives import collective_traffic
from xla_dtensor.plans.pin import pin

SIZES = {"dp": 2, "tp": 4}
ROWS, IN, OUT = 512, 32, 64
WHOLE: Any = ((), ())


def choice(
    function: Any, given: list[Any], required: Any, arguments: tuple[int, ...], **options: Any
) -> Choice:
    """Of a function of arrays, given as their shapes and layouts."""
    arrays = [jnp.zeros(shape) for shape, _ in given]
    closed = jax.make_jaxpr(lambda: function(*arrays))()
    numbers = [[const is array for array in arrays].index(True) for const in closed.consts]
    variables = dict(zip(numbers, closed.jaxpr.constvars, strict=True))
    known = {variable: given[i][1] for i, variable in variables.items()}
    of = [variables[i] for i in arguments]
    sizes = options.pop("sizes", SIZES)
    if "sought" in options:
        options["sought"] = [[variables[i]] for i in options["sought"]]
    return next(choices(closed.jaxpr, known, [required], sizes, of, **options))


def moves(found: Choice) -> list[tuple[str, tuple[str, ...], float]]:
    return sorted((move.kind, move.axes, move.nbytes) for move in found.moves())


def test_the_second_of_two_gathers_has_what_the_first_has_left() -> None:
    batch = ((ROWS, IN), (("dp", "tp"), ()))
    weight = ((IN, OUT), (("dp",), ("tp",)))
    found = choice(lambda x, w: x @ w, [batch, weight], (("dp", "tp"), ()), (0,))
    nbytes = IN * OUT * 4
    assert moves(found) == [
        ("all-gather", ("dp",), nbytes / SIZES["tp"]),
        ("all-gather", ("tp",), nbytes),
    ]


def test_one_sum_along_axes_that_cut_the_same_dim() -> None:
    both = (("dp", "tp"), ())
    given = [((ROWS, IN), both), ((ROWS, OUT), both)]
    found = choice(lambda x, y: x.T @ y, given, WHOLE, (0, 1))
    assert moves(found) == [("all-reduce", ("dp", "tp"), IN * OUT * 4)]


def test_two_sums_along_axes_that_cut_two_dims() -> None:
    both = (("dp",), ("tp",), ())
    given = [((16, 32, IN), both), ((16, 32, OUT), both)]
    found = choice(lambda x, y: jnp.einsum("bsi,bso->io", x, y), given, WHOLE, (0, 1))
    nbytes = IN * OUT * 4
    assert moves(found) == [("all-reduce", ("dp",), nbytes), ("all-reduce", ("tp",), nbytes)]


@pytest.mark.parametrize("home", [(("dp",), ()), WHOLE])
def test_an_idle_axis_is_used_where_that_moves_less(home: Any) -> None:
    """Of a gradient that "dp" cuts devices along "tp" make a part each; one that is whole anyway
    would have to be gathered along "tp"."""
    batch = (("dp",), ())
    given = [((ROWS, IN), batch), ((ROWS, OUT), batch)]
    found = choice(lambda x, y: x.T @ y, given, home, (0, 1))
    nbytes = IN * OUT * 4
    if home == WHOLE:
        assert moves(found) == [("all-reduce", ("dp",), nbytes)]
    else:
        total = sum(move.nbytes for move in found.moves())
        assert total == nbytes / SIZES["tp"] + nbytes / SIZES["dp"]


def test_what_was_cast_moves_in_its_own_dtype() -> None:
    """A float32 weight that is computed with in bfloat16 is gathered after the cast, and a gradient
    is added up before it: on GPUs by a reduce-scatter, elsewhere it is cut later as well."""

    def gradient(x: Any, w: Any) -> Any:
        y = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return (x.astype(jnp.bfloat16).T @ y).astype(jnp.float32)

    batch, weight = ((ROWS, IN), (("dp",), ())), ((IN, IN), (("dp",), ()))
    for prices, kinds in (
        (BY_BYTES, {"all-reduce", "reduce-scatter"}),
        (COMPILED_FOR_GPUS, {"reduce-scatter"}),
    ):
        found = choice(gradient, [batch, weight], (("dp",), ()), (0,), prices=prices)
        gather, total = [move for move in moves(found) if move[1] == ("dp",)]
        assert gather == ("all-gather", ("dp",), IN * IN * 2)
        assert total[0] in kinds and total[2] == IN * IN * 2


def test_state_is_shared_where_that_is_cheaper_than_that_each_reads_and_writes_all() -> None:
    """A sum that all get costs two of one that is cut, and then the optimizer's state is cut, too.
    Of devices whose links nobody knows the bytes count, and the weight stays whole."""

    def momentum(x: Any, w: Any, m: Any, v: Any) -> Any:
        gradient = x.T @ (x @ w)
        m, v = 0.9 * m + gradient, 0.9 * v + gradient * gradient
        return w - m / jnp.sqrt(v)

    whole, cut = ["all-reduce"], ["all-gather", "reduce-scatter"]
    for prices, dim, kinds in (
        (BY_BYTES, 1024, whole),
        (BY_TIME, 1024, cut),
        (BY_TIME, 128, whole),  # it is too little to be worth a collective
    ):
        batch, state = ((8 * dim, dim), (("dp",), ())), ((dim, dim), None)
        given: Any = momentum, [batch, state, state, state], None, (0,)
        found = choice(*given, sizes={"dp": 8}, sought=[1], prices=prices)
        assert [kind for kind, *_ in moves(found)] == kinds
        # Weight, both of its state, and the gradient, read and written.
        kept = 2 * 4 * dim * dim * 4 / (8 if kinds == cut else 1)
        assert found.kept() == kept
        assert found.price() >= kept * prices.kept


def test_slices_in_a_loop_move_in_their_own_dtype() -> None:
    def loop(x: Any, w: Any) -> Any:
        layer = lambda x, w: (jnp.tanh(x @ w.astype(jnp.bfloat16)), None)
        return jax.lax.scan(layer, x.astype(jnp.bfloat16), w)[0]

    batch, weights = ((ROWS, IN), (("dp",), ())), ((4, IN, IN), ((), ("dp",), ()))
    found = choice(loop, [batch, weights], (("dp",), ()), (0,))
    assert moves(found) == [("all-gather", ("dp",), IN * IN * 2)]
    assert [move.times for move in found.moves()] == [4]


@pytest.mark.parametrize("experts", [4, 8])
def test_a_dim_is_left_to_the_axis_that_needs_it_most(experts: int) -> None:
    """The first axis may have experts for itself, if the second one, which has theirs, isn't
    thought of yet: then that one moves all of them (Mixtral on 32 GPUs moved 5 times as much)."""
    D, F, C = 32, 256, 24  # model, hidden, capacity
    tokens = ((32, experts, C, D), (("dp", "tp"), (), (), ()))
    up = ((experts, D, F), (("tp",), ("dp",), ()))
    down = ((experts, F, D), (("tp",), (), ("dp",)))

    def function(x: Any, w1: Any, w2: Any) -> Any:
        return jnp.einsum("becf,efd->becd", jnp.tanh(jnp.einsum("becd,edf->becf", x, w1)), w2)

    found = choice(function, [tokens, up, down], tokens[1], (0,))
    weight, activation = experts * D * F * 4 / SIZES["tp"], 32 * experts * C * D * 4 / 8
    assert moves(found) == [
        *[("all-gather", ("dp",), weight)] * 2,
        *[("all-to-all", ("tp",), activation)] * 2,
    ]


@pytest.mark.parametrize("is_causal", [True, False])
def test_causal_attention_is_cut_by_heads(is_causal: bool) -> None:
    """Of queries that are cut all see all keys, for all that a program of all devices knows; heads
    move a little more. What isn't causal loses nothing."""
    mesh = make_mesh("2x4")
    torch.manual_seed(0)
    values = [torch.randn(2, heads, 512, 8) for heads in (16, 4, 4)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q * 2, k, v, is_causal=is_causal, enable_gqa=True) * 2

    by_position = [xd.Shard(0), xd.Shard(2)]
    step = xd.compile(lambda *given: attend(*given).redistribute(placements=by_position))
    given = [xd.distribute_tensor(x, mesh, by_position) for x in values]
    torch.testing.assert_close(step(*given).full_tensor().cpu(), attend(*values))
    counts = collective_traffic(step.compiled_programs()[-1].as_text()).counts
    assert {*counts} == ({"all-to-all"} if is_causal else {"all-gather"})


def test_what_crosses_the_slow_network_is_a_shard() -> None:
    """The gradient of a weight that each slice has sharded, of a batch over all."""
    both, sharded = (("dp", "tp"), ()), (("tp",), ())
    given = [((ROWS, 256), both), ((ROWS, 256), both)]
    nbytes = 256 * 256 * 4
    on_gpus = {"slow": {"dp": 1}, "prices": COMPILED_FOR_GPUS}
    found = choice(lambda x, y: x.T @ y, given, sharded, (0, 1), **on_gpus)
    assert moves(found) == [
        ("all-reduce", ("dp",), nbytes / SIZES["tp"]),
        ("reduce-scatter", ("tp",), nbytes),
    ]


@pytest.mark.parametrize(
    ("width", "prices", "is_narrow"),
    [
        (256, BY_BYTES, True),
        (256, COMPILED_FOR_TPUS, False),  # 64 of 256 columns would be sent as 128
        (512, COMPILED_FOR_TPUS, True),
        (64, COMPILED_FOR_TPUS, True),  # whole it is filled up, too
    ],
)
def test_a_tables_gradient_goes_between_slices_in_whole_vectors(
    width: int, prices: Prices, is_narrow: bool
) -> None:
    both, sharded = (("dp", "tp"), ()), (("tp",), ())
    tokens, rows = 16384, 4096

    def gradient(index: Any, given: Any) -> Any:
        return jnp.zeros((rows, width)).at[index[:, 0].astype(int)].add(given)

    given = [((tokens, 1), both), ((tokens, width), both)]
    found = choice(gradient, given, sharded, (0, 1), slow={"dp": 1}, prices=prices)
    exchanged = [move for move in moves(found) if move[:2] == ("all-to-all", ("tp",))]
    assert bool(exchanged) == is_narrow


def test_a_weight_is_gathered_across_before_it_is_inside() -> None:
    batch, weight = ((ROWS, IN), (("tp", "dp"), ())), ((IN, OUT), (("dp",), ("tp",)))
    sizes = {"tp": SIZES["tp"], "dp": SIZES["dp"]}
    nbytes = IN * OUT * 4
    for slow, across in (({}, nbytes), ({"dp": 1}, nbytes / SIZES["tp"])):
        found = choice(lambda x, w: x @ w, [batch, weight], batch[1], (0,), slow=slow, sizes=sizes)
        assert ("all-gather", ("dp",), across) in moves(found)


def test_no_dim_is_cut_into_more_than_it_has() -> None:
    """Layout rules may each have another axis for a dim; both are more devices than rows. XLA took
    every shard to every device then, to sum a norm's weight's gradient over both axes at once."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    by_rule = lambda x, axis: pin(PIN)(x, NamedSharding(mesh, PartitionSpec(axis)))

    def gradient(x: Any, y: Any, w: Any) -> Any:
        return by_rule(by_rule(x * y, "tp"), "dp").sum((0, 1)) + (w * w).sum()

    rows = (4, 32, 4096), (("dp",), (), ())
    given = [rows, rows, ((4096,), (("tp",),))]
    found = choice(gradient, given, ((),), (0,), slow={"dp": 1})
    of_rows = found.operand(0, 0)
    assert of_rows is not None
    assert of_rows[0] == ("dp",)


@pytest.mark.parametrize("prices", [BY_BYTES, COMPILED_FOR_TPUS])
def test_tolls(prices: Prices) -> None:
    slow = prices.slow
    assert prices.toll([(4, 4), (2, 2)]) == 1
    assert prices.toll([(2, 1)]) == slow == prices.toll([(2, 1), (4, 1)])
    assert prices.toll([(2, 1), (4, 4)]) == 1 + slow / 4  # a quarter goes across
    assert prices.toll([(8, 4)]) == 1 + slow / 4  # of one axis, too
