"""Checks of a prepared part when it is constructed."""

from __future__ import annotations

from typing import Any

import pytest

from heapline.contract import batches
from heapline.contract.batches import CommitBatch, PrepareBatch, Share
from heapline.contract.errors import BadRequest
from heapline.contract.messages import NewMessages


class CountedName(str):
    """A name that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)


def part(count: int) -> PrepareBatch:
    return PrepareBatch("batch", "part", [Share(f"topic{i}", NewMessages([])) for i in range(count)])


def test_topics_of_a_part_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "canonical_topic", CountedName)
    monkeypatch.setattr(CountedName, "compared", 0)
    part(1000)
    assert CountedName.compared < 1000


@pytest.mark.parametrize("given", [{"sink": "s"}, {"version": 3}])
def test_sink_and_version_require_each_other(given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="give both or neither"):
        PrepareBatch("batch", "part", [Share("jobs", NewMessages([]))], **given)
    with pytest.raises(BadRequest, match="give both or neither"):
        CommitBatch("batch", ["part"], **given)


def test_topic_given_twice_is_refused_however_it_is_spelled() -> None:
    with pytest.raises(BadRequest, match="topic 'jobs' is given twice in part 'part'"):
        PrepareBatch("batch", "part", [Share(name, NewMessages([])) for name in ("jobs", "default/jobs")])
