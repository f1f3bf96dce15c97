"""Valid arguments of a rebuild, and logs that no longer reach back far enough."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from heapline.contract.errors import BadRequest
from heapline.spark.jobs.rebuild import check_asked, check_complete

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "either `at`"),
        ({"at": NOW, "offsets": {0: 1}}, "either `at`"),
        ({"at": datetime(2026, 1, 1)}, "has no time zone"),
        ({"at": datetime(2027, 1, 1, tzinfo=UTC)}, "is in the future"),
        ({"offsets": {}}, "partition: offset"),
        ({"offsets": {0: -1}}, "from 0 on"),
    ],
)
def test_rebuild_rejects_invalid_times(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        check_asked(asked.get("at"), asked.get("offsets"), NOW)


def test_rebuild_rejects_a_log_without_its_beginning() -> None:
    check_complete({0: 0, 1: 0}, "jobs")
    with pytest.raises(BadRequest, match="begins at offset 71 of partition 1: earlier rows were reclaimed"):
        check_complete({0: 0, 1: 71}, "jobs")
