"""`consume` without Spark: what happens to leases when the function returns, rejects or fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.contract.errors import BadRequest, LeaseLost, ResourceExhausted, UnavailableError
from heapline.contract.message import Outgoing
from heapline.spark.consumer import ConsumeResult, consume, consume_with
from heapline.spark.schema import CONSUMED, arrow_schema


@pytest.fixture
def hl(tmp_path: Path) -> Iterator[Any]:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as broker:
        broker.create_topic("jobs", partitions=2, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        yield broker


def fill(hl: Any, count: int) -> None:
    hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, i, key=f"k{i}", headers={"n": str(i)}) for i in range(count)])


def run(hl: Any, fn: Any, max_messages: int = 100, **more: Any) -> ConsumeResult:
    return consume_with(hl, lambda table: table, "jobs", fn, max_messages, **more)


def test_consume_passes_the_best_messages_and_acks_them(hl: Any) -> None:
    fill(hl, 30)
    seen = []
    assert run(hl, seen.append, 12) == ConsumeResult(12, 12, 0, ())
    (table,) = seen
    assert table.schema == arrow_schema(CONSUMED)
    assert table["value"].to_pylist() == [b"%d" % i for i in range(12)]
    assert table["priority"].to_pylist() == list(range(12))
    assert table["headers"][3].as_py() == [{"key": "n", "value": b"3"}]
    assert (table["key"][3].as_py(), table["attempts"][3].as_py()) == (b"k3", 1)
    stats = hl.stats("jobs")
    assert (stats.ready, stats.leased) == (18, 0)


def test_many_messages_are_leased_in_several_pops(hl: Any) -> None:
    for _ in range(3):
        fill(hl, 900)
    assert run(hl, lambda table: None, 2500) == ConsumeResult(2500, 2500, 0, ())
    assert run(hl, lambda table: None, 2500).leased == 200


def test_failed_function_releases_all_messages_without_an_attempt(hl: Any) -> None:
    fill(hl, 5)

    def fail(table: Any) -> None:
        raise ZeroDivisionError("in fn")

    with pytest.raises(ZeroDivisionError, match="in fn"):
        run(hl, fail)
    again = []
    assert run(hl, again.append).acked == 5
    assert again[0]["attempts"].to_pylist() == [1] * 5


def test_rejected_messages_are_nacked_with_their_reason(hl: Any) -> None:
    fill(hl, 6)

    def refuse(table: Any) -> list[Any]:
        ids = table["message_id"].to_pylist()
        return [ids[0], (ids[1], "too large"), (table["id"][2].as_py(), "too large")]

    assert run(hl, refuse) == ConsumeResult(6, 3, 3, ())
    stats = hl.stats("jobs")
    assert (stats.delayed, stats.leased, stats.ready) == (3, 0, 0)


class Frame:
    """The part of a DataFrame that is used."""

    def __init__(self, **columns: list[Any]) -> None:
        self._columns, self.columns = columns, list(columns)

    def select(self, *names: str) -> Frame:
        return Frame(**{name: self._columns[name] for name in names})

    def collect(self) -> list[tuple[Any, ...]]:
        return list(zip(*self._columns.values(), strict=True))


def test_rejected_messages_can_be_a_dataframe(hl: Any) -> None:
    fill(hl, 4)
    result = run(hl, lambda t: Frame(x=[1, 2], message_id=t["message_id"].to_pylist()[:2], reason=["a", None]))
    assert result == ConsumeResult(4, 2, 2, ())


@pytest.mark.parametrize(
    ("returned", "why"),
    [("abc", "not str"), (7, "not int"), ([12345], "were not passed to it"), (Frame(x=[1]), "needs a column")],
)
def test_invalid_rejections_release_everything(hl: Any, returned: Any, why: str) -> None:
    fill(hl, 4)
    with pytest.raises(BadRequest, match=why):
        run(hl, lambda table: returned)
    assert hl.stats("jobs").ready == 4


def test_function_is_not_called_without_messages(hl: Any) -> None:
    assert run(hl, lambda table: pytest.fail("called")) == ConsumeResult(0, 0, 0, ())


class Lending:
    """A client that wraps another and loses or breaks calls on request."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.extended = threading.Semaphore(0)
        self.lose: list[int] = []
        self.fail = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def extend(self, messages: list[Any], seconds: float) -> None:
        self.extended.release()
        if self.fail:
            self.fail -= 1
            raise UnavailableError("away")
        self._client.extend(messages, 60.0)
        if self.lose:
            lost, self.lose = self.lose, []
            raise LeaseLost(lost, "jobs")

    def pop(self, topic: str, count: int, *, visibility: float, **more: Any) -> Any:
        return self._client.pop(topic, count, visibility=60.0, **more)


def test_leases_are_extended_even_after_a_failed_extension(hl: Any) -> None:
    fill(hl, 3)
    client = Lending(hl)
    client.fail = 2

    def long(table: Any) -> None:
        for _ in range(4):
            assert client.extended.acquire(timeout=20)

    assert run(client, long, visibility=0.03) == ConsumeResult(3, 3, 0, ())


def test_lost_lease_is_reported_and_the_rest_acked(hl: Any) -> None:
    fill(hl, 3)
    client = Lending(hl)
    gone: list[int] = []

    def slow(table: Any) -> None:
        gone.append(table["id"][1].as_py())
        client.lose = gone
        for _ in range(3):
            assert client.extended.acquire(timeout=20)

    assert run(client, slow, visibility=0.03) == ConsumeResult(3, 2, 0, (gone[0],))


def test_expired_lease_is_detected_at_ack(hl: Any) -> None:
    fill(hl, 3)

    def stolen(table: Any) -> None:
        held = {m.id: m for m in kept}
        hl.release(held[table["id"][0].as_py()])

    kept: list[Any] = []

    class Watching(Lending):
        def pop(self, *args: Any, **more: Any) -> Any:
            found = super().pop(*args, **more)
            kept.extend(found)
            return found

    result = run(Watching(hl), stolen)
    assert (result.acked, len(result.lost)) == (2, 1)


def test_consume_processes_what_it_leased_at_the_lease_limit(hl: Any) -> None:
    for _ in range(2):
        fill(hl, 900)

    class Limited(Lending):
        pops = 0

        def pop(self, *args: Any, **more: Any) -> Any:
            self.pops += 1
            if self.pops > 1:
                raise ResourceExhausted("leases", 1000)
            return super().pop(*args, **more)

    assert run(Limited(hl), lambda table: None, 1500).acked == 1000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"where": {"path": "data"}}, "set heapline.url instead of path"),
        ({"where": {"subscribe": "jobs"}}, "unknown option 'subscribe' in where"),
        ({"max_messages": 0}, "must both be over 0"),
        ({"visibility": 0.0}, "must both be over 0"),
    ],
)
def test_invalid_arguments_of_consume_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        consume(None, "jobs", print, **given)
