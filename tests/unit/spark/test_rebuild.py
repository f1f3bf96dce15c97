"""What may be asked of a rebuild, and where a log no longer tells enough."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from heapline.errors import BadRequest
from heapline.spark.jobs.rebuild import check_asked, check_complete

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "either `at`"),
        ({"at": NOW, "offsets": {0: 1}}, "either `at`"),
        ({"at": datetime(2026, 1, 1)}, "names no time zone"),
        ({"at": datetime(2027, 1, 1, tzinfo=UTC)}, "has not been yet"),
        ({"offsets": {}}, "partition: offset"),
        ({"offsets": {0: -1}}, "from 0 on"),
    ],
)
def test_moment_that_cannot_be_rebuilt_is_refused_with_what_to_do(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        check_asked(asked.get("at"), asked.get("offsets"), NOW)


def test_log_whose_beginning_is_gone_is_refused_and_says_where_it_begins() -> None:
    check_complete({0: 0, 1: 0}, "jobs")
    with pytest.raises(BadRequest, match="begins at offset 71 of partition 1: what came before was reclaimed"):
        check_complete({0: 0, 1: 71}, "jobs")
