"""How the ranks' requests come together: no tensors, no threads, no processes."""

from __future__ import annotations

from typing import Any

import pytest

from xla_dtensor.horovod.collectives.collective import HorovodCollective, Request
from xla_dtensor.horovod.collectives.kinds import Allgather, Allreduce, Alltoall, Join
from xla_dtensor.horovod.collectives.reductions import Average, Sum
from xla_dtensor.horovod.collectives.requests import Response
from xla_dtensor.horovod.ranks.coordinator import Coordinator
from xla_dtensor.horovod.ranks.fusion import Waiting, batches
from xla_dtensor.horovod.ranks.service import packed, unpacked

SUM = Allreduce(Sum)


def request(
    name: str, collective: HorovodCollective = SUM, size: int = 2, **changes: object
) -> Request:
    options = {"shapes": ((4,),), "dtypes": ("float32",)} | changes
    return Request(collective, name, tuple(range(size)), **options)  # type: ignore[arg-type]


def submitted(given: list[tuple[int, Request]], size: int = 2) -> list[list[Response]]:
    coordinator = Coordinator(size)
    return [coordinator.submit(rank, each) for rank, each in given]


def test_ready_once_all_have_asked_in_the_order_of_the_last() -> None:
    found = submitted([(0, request("a")), (0, request("b")), (1, request("b")), (1, request("a"))])
    assert [[r.key for r in each] for each in found] == [[], [], ["0:b"], ["0:a"]]
    assert not found[2][0].error and sorted(found[2][0].requests) == [0, 1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shapes": ((5,),)}, "mismatched shapes: rank 0: [4]; rank 1: [5]"),
        ({"shapes": ((4, 1),)}, "mismatched ranks of tensors: rank 0: 1 dims; rank 1: 2 dims"),
        ({"dtypes": ("int32",)}, "mismatched data types: rank 0: float32; rank 1: int32"),
        ({"collective": Allreduce(Average)}, "mismatched reductions: rank 0: Sum; rank 1: Average"),
        (
            {"collective": Allreduce(Sum, 2.0)},
            "mismatched prescale factors: rank 0: 1.0; rank 1: 2.0",
        ),
        (
            {"collective": Allreduce(Sum, postscale=2.0)},
            "mismatched postscale factors: rank 0: 1.0; rank 1: 2.0",
        ),
        ({"shapes": ((4,), (4,))}, "mismatched numbers of tensors: rank 0: 1; rank 1: 2"),
        (
            {"collective": Allgather()},
            "mismatched collectives: rank 0: allreduce; rank 1: allgather",
        ),
    ],
)
def test_what_differs_is_told_with_the_ranks(change: dict[str, Any], told: str) -> None:
    *_, (response,) = submitted([(0, request("x")), (1, request("x", **change))])
    assert response.error == f"allreduce 'x': {told}"


def test_ranks_that_say_the_same_are_told_together() -> None:
    given = [(r, request("x", size=4, shapes=((4 + (r == 2),),))) for r in range(4)]
    *_, (response,) = submitted(given, 4)
    assert response.error.endswith("ranks 0, 1 and 3: [4]; rank 2: [5]")


def test_a_deadlock_is_found_when_the_last_one_waits() -> None:
    coordinator = Coordinator(3)
    coordinator.submit(0, request("a", size=3))
    coordinator.submit(1, request("b", size=3))
    coordinator.submit(2, request("a", size=3))
    assert coordinator.block(0, "0:a") == coordinator.block(1, "0:b") == []
    found = coordinator.block(2, "0:a")
    assert [r.key for r in found] == ["0:a", "0:b"] and found[0].error == found[1].error
    assert "allreduce 'a' (ranks 0 and 2 waiting, without rank 1)" in found[0].error
    assert "allreduce 'b' (rank 1 waiting, without ranks 0 and 2)" in found[0].error
    # All can go on.
    for rank in range(3):
        found = coordinator.submit(rank, request("c", size=3))
    assert not found[0].error


def test_who_has_something_to_do_is_no_deadlock() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(0, request("a"))
    assert coordinator.block(0, "0:a") == []
    coordinator.submit(1, request("b"))  # rank 1 goes on
    assert coordinator.block(0, "0:a") == []
    (response,) = coordinator.submit(1, request("a"))
    assert not response.error
    # Rank 0's answer is on its way when it says that it waits.
    assert coordinator.block(0, "0:a") == [] and coordinator.block(1, "0:b") == []


def test_a_rank_that_ends_fails_what_waits_for_it() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(0, request("a"))
    (response,) = coordinator.end(1, "has raised KeyError: 3")
    assert response.error == "allreduce 'a': rank 0 waited, but rank 1 has raised KeyError: 3"
    (later,) = coordinator.submit(0, request("b"))
    assert "rank 1 has raised" in later.error


def test_joined_ranks_take_part_until_all_have() -> None:
    coordinator = Coordinator(2)
    join = Request(Join(), "join", (0, 1))
    coordinator.submit(1, request("a"))
    (response,) = coordinator.submit(0, join)
    assert not response.error and sorted(response.requests) == [1] and response.ranks == (0, 1)
    (refused,) = coordinator.submit(1, request("b", Allgather()))
    assert "rank 0 joined" in refused.error
    (done,) = coordinator.submit(1, join)
    assert done.key == "0:join" and done.last == 1 and not done.error
    assert coordinator.submit(0, request("c")) == []  # nobody has joined any more


def test_a_join_for_which_a_rank_is_gone() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(0, Request(Join(), "join", (0, 1)))
    (response,) = coordinator.end(1, "has come to its end")
    assert response.key == "0:join" and "rank 1 has come to its end" in response.error


def test_texts_bring_back_what_was_sent() -> None:
    one = request("x", Alltoall((1, 2)), shapes=((3, 4), ()), dtypes=("int8", "bool"))
    response = Response("0:x", (0, 1), {0: one, 1: one}, "an error", 1)
    assert unpacked(packed([response, one])) == [response, one]


def test_what_waits_is_launched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def responses(names: str, ranks: tuple[int, ...] = (0, 1)) -> list[Response]:
        return [Response(f"0:{name}", ranks, {0: request(name)}) for name in names]

    mixed = [*responses("ab"), *responses("c", (0,)), *responses("de")]
    assert ["".join(r.key[-1] for r in each) for each in batches(mixed)] == ["ab", "c", "de"]
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "32")
    waiting = Waiting()
    a, b, c = responses("abc")
    assert not waiting.add(a) and waiting.add(b)  # 16 bytes each
    assert waiting.take() == [[a, b]] and not waiting
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    assert waiting.add(a) and waiting.add(c)
    assert waiting.take() == [[a], [c]]
