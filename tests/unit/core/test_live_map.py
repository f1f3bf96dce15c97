import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest
from heapline.core.live_map import LiveMap
from heapline.core.record import ALIGN, SIZE_BOUNDS, PositionLayout, with_attempts

LAYOUT = PositionLayout(1 << 20)
PLACES = (1 << 20) // ALIGN
Spot = tuple[int, int]


def positions(spots: list[Spot], attempts: int = 0) -> npt.NDArray[np.int64]:
    """The size class follows from the place, so that a record always has the same one."""
    return np.array([LAYOUT.pack(s, p * ALIGN, p % 7, attempts) for s, p in spots], dtype=np.int64)


def dense(segment: int, count: int, start: int = 0) -> list[Spot]:
    return [(segment, start + 3 * i) for i in range(count)]


spots = st.tuples(st.integers(0, 3) | st.just(1 << 27), st.integers(0, 200) | st.integers(0, PLACES - 1))
batches = (
    st.lists(spots, max_size=60, unique=True)
    | st.builds(dense, st.integers(0, 2), st.integers(17, 300), st.integers(0, 60_000))
    | st.lists(st.tuples(st.just(1), st.integers(0, PLACES - 1)), min_size=17, max_size=40, unique=True)
)


@given(st.lists(st.tuples(st.booleans(), batches), max_size=8), st.lists(spots, max_size=40))
def test_map_agrees_with_a_set_of_live_records(steps: list[tuple[bool, list[Spot]]], asked: list[Spot]) -> None:
    live, model = LiveMap(LAYOUT, check=True), set[Spot]()
    for add, batch in steps:
        if add:
            batch = [spot for spot in batch if spot not in model]
            live.add(positions(batch))
            model |= set(batch)
        else:
            batch = [spot for spot in batch if spot in model] + sorted(model)[::2]
            batch = list(dict.fromkeys(batch))
            live.remove(positions(batch, attempts=3))
            model -= set(batch)
        asked = asked + batch
    assert live.alive(positions(asked, attempts=1)).tolist() == [spot in model for spot in asked]
    assert [live.is_alive(int(p)) for p in positions(asked)] == [spot in model for spot in asked]
    for segment in {s for s, _ in asked} | set(live.segments()):
        places = sorted(p for s, p in model if s == segment)
        assert live.count(segment) == len(places)
        assert live.bytes(segment) == sum(int(SIZE_BOUNDS[p % 7]) for p in places)
        assert live.places(segment).tolist() == [p * ALIGN for p in places]


@pytest.mark.parametrize("count", [1, 100])
def test_attempts_do_not_matter(count: int) -> None:
    live, rows = LiveMap(LAYOUT), positions(dense(2, count))
    live.add(rows)
    assert live.alive(with_attempts(rows, 9)).all()
    live.remove(with_attempts(rows, 200))
    assert not live.alive(rows).any()


@pytest.mark.parametrize("count", [1, 100])
def test_removing_a_dead_record_raises_only_when_checking(count: int) -> None:
    rows = positions(dense(2, count))
    live = LiveMap(LAYOUT, check=True)
    live.add(rows)
    live.remove(rows[-1:])
    with pytest.raises(BadRequest):
        live.remove(rows)
    with pytest.raises(BadRequest):
        live.remove(np.concatenate((rows[:1], rows[:1])))
    if count > 1:
        with pytest.raises(BadRequest):
            live.add(rows)


def test_dropped_segment_is_dead_and_takes_no_memory() -> None:
    live = LiveMap(LAYOUT)
    live.add(positions(dense(1, 50) + dense(2, 50)))
    live.drop(1)
    live.drop(77)
    assert live.segments() == [2]
    assert live.alive(positions(dense(1, 50) + dense(2, 50))).sum() == 50
    assert live.count(1) == live.bytes(1) == len(live.places(1)) == 0
    live.drop(2)
    assert live.nbytes == 0


def test_memory_is_small_at_first_and_bounded_by_the_segment() -> None:
    layout = PositionLayout(64 << 20)
    live = LiveMap(layout)
    live.add(np.array([layout.pack(0, 0, 0)]))
    assert live.nbytes <= 1024
    for place in range(0, 4 << 20, 1 << 14):
        live.add(np.array([layout.pack(1, place * ALIGN, 0)]))
    live.add(np.array([layout.pack(1, (64 << 20) - ALIGN, 0)]))
    assert live.nbytes <= 1024 + (512 << 10)


@pytest.mark.parametrize("others", [[], dense(2, 20)])
def test_places_just_past_the_map_are_dead(others: list[Spot]) -> None:
    live = LiveMap(LAYOUT)
    live.add(positions([(1, 0), *others]))
    edge = live.nbytes // len(live.segments()) * 8
    asked = [(1, place) for place in range(edge - 20, edge + 1)]
    assert not live.alive(positions(asked + others))[: len(asked)].any()


@pytest.mark.parametrize("nbytes", [128, 1024, 1 << 20])
def test_places_by_parts_are_those_of_the_segment(nbytes: int) -> None:
    layout = PositionLayout(1 << 20)
    live = LiveMap(layout)
    offsets = np.unique(np.random.default_rng(7).integers(0, 1 << 16, 500)) * 16
    offsets = offsets[offsets < 1 << 20]
    live.add(layout.pack(3, offsets, np.zeros(len(offsets), dtype=np.int64)))
    found: list[int] = []
    start: int | None = 0
    while start is not None:
        places, start = live.places_from(3, start, nbytes)
        found += places.tolist()
    assert found == live.places(3).tolist() == offsets.tolist()
    rest, _ = live.places_from(3, int(offsets[100]) + 1, 1 << 20)
    assert rest.tolist() == offsets[101:].tolist()
    assert live.places_from(9, 0, nbytes)[1] is None
