"""The option `group`: an observer group shows the progress of a stream and never blocks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.contract.errors import BadRequest, UnavailableError
from heapline.contract.message import Outgoing
from heapline.spark.offsets import ObserverGroup
from heapline.spark.options import parse_options


@pytest.fixture
def hl(tmp_path: Path) -> Iterator[Any]:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as broker:
        broker.create_topic("jobs", partitions=2, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        broker.enqueue_batch("jobs", [Outgoing(b"%d" % i, key=f"k{i}") for i in range(30)])
        yield broker


class Lent:
    """Return a client that is not closed."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        pass


def committed(hl: Any, group: str = "spark") -> dict[int, int]:
    return {offset.partition: offset.committed for offset in hl.group_offsets("jobs", group)}


def test_progress_is_published_to_an_observer_created_on_demand(hl: Any) -> None:
    progress = ObserverGroup("spark", lambda deadline: Lent(hl))
    progress.publish({"jobs": {"0": 3, "1": 5, "incarnation": 1}})
    assert committed(hl) == {0: 3, 1: 5}
    assert hl.get_group("jobs", "spark").config.observer
    progress.publish({"jobs": {"0": 7, "1": 5, "incarnation": 1}})
    assert committed(hl) == {0: 7, 1: 5}
    hl.delete_group("jobs", "spark")
    progress.publish({"jobs": {"0": 8, "1": 5, "incarnation": 1}})  # logged and given up
    progress.publish({"jobs": {"0": 9, "1": 5, "incarnation": 1}})
    assert committed(hl) == {0: 9, 1: 5}
    progress.close()


def test_observer_group_is_not_moved_by_its_own_events(hl: Any) -> None:
    one, other = (ObserverGroup(name, lambda deadline: Lent(hl)) for name in ("one", "other"))

    def at_end() -> dict[str, dict[str, int]]:
        return {"jobs": {str(p): end for p, (_, end) in hl.offsets("jobs").items()}}

    for progress in (one, other, one, other):
        progress.publish(at_end())  # of all that was there, what the others did too
    before = at_end()
    for progress in (one, other):
        progress.publish(at_end())
    assert at_end() == before
    hl.enqueue("jobs", b"more", key="k1")
    for progress in (one, other):
        progress.publish(at_end())
    assert at_end() != before
    assert [hl.get_group("jobs", name).lag for name in ("one", "other")] == [0, 0]


def test_group_that_is_not_an_observer_is_never_moved(hl: Any, caplog: pytest.LogCaptureFixture) -> None:
    hl.create_group("jobs", "spark")
    ObserverGroup("spark", lambda deadline: Lent(hl)).publish({"jobs": {"0": 3, "1": 5}})
    assert committed(hl) == {0: 0, 1: 0}
    assert "the group is not an observer" in caplog.text


def test_publishing_errors_are_logged_and_not_raised(hl: Any, caplog: pytest.LogCaptureFixture) -> None:
    def away(deadline: float) -> Any:
        raise UnavailableError("the server is away")

    ObserverGroup("spark", away).publish({"jobs": {"0": 3}})
    assert "progress not published" in caplog.text
    ObserverGroup("spark", lambda deadline: Lent(hl)).publish({"nothing": {"0": 3}, "jobs": {"0": 3, "1": 0}})
    assert committed(hl) == {0: 3, 1: 0}


@pytest.mark.parametrize(
    ("given", "streaming", "message"),
    [
        ({"path": "data"}, True, "reads from a server"),
        ({"heapline.url": "localhost:1"}, False, "progress of a stream"),
        ({"heapline.url": "localhost:1", "group": "a b/c"}, True, "is not a valid name"),
    ],
)
def test_group_option_is_rejected_elsewhere(given: dict[str, str], streaming: bool, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_options({"subscribe": "jobs", "group": "spark", **given}, streaming=streaming)


def test_group_option_is_accepted_for_streams_from_a_server() -> None:
    asked = parse_options({"subscribe": "jobs", "heapline.url": "localhost:1", "group": "spark"}, streaming=True)
    assert asked.group == "spark"
