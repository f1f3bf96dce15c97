from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from heapline.contract.errors import BadName, BadRequest
from heapline.contract.schedules import make_schedule

DAY = datetime(2026, 11, 16, tzinfo=UTC)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({}, "neither is given"),
    "both": ({"cron": "* * * * *", "every": 60}, "not both"),
    "every too small": ({"every": 0.5}, "give 1 to"),
    "every too large": ({"every": timedelta(days=367)}, "give 1 to 31622400 seconds"),
    "every not a number": ({"every": "1h"}, "give 1 to"),
    "every not finite": ({"every": float("nan")}, "give 1 to"),
    "every true": ({"every": True}, "give 1 to"),
    "tz with every": ({"every": 60, "tz": "Europe/Berlin"}, "omit tz"),
    "unknown tz": ({"cron": "* * * * *", "tz": "Mars"}, "not a time zone"),
    "cron not text": ({"cron": 5}, "cron and tz are str"),
    "bad cron": ({"cron": "x * * * *"}, "minute field 'x'"),
    "starts naive": ({"every": 60, "starts": datetime(2026, 1, 1)}, "with a time zone"),
    "starts no moment": ({"every": 60, "starts": "now"}, "with a time zone"),
    "starts too early": ({"every": 60, "starts": datetime(1960, 1, 1, tzinfo=UTC)}, "out of range"),
    "ends before it starts": ({"every": 60, "starts": DAY, "ends": DAY}, "not later than starts"),
    "misfire": ({"every": 60, "misfire": "never"}, 'misfire is "skip", "once" or "all"'),
    "grace": ({"every": 60, "grace": 3601}, "give 0 to 3600"),
    "makeup_max": ({"every": 60, "makeup_max": 0}, "1 to 1000"),
    "payload": ({"every": 60, "payload": "text"}, "encode it first"),
    "priority": ({"every": 60, "priority": "high"}, "invalid settings of a schedule"),
    "headers no mapping": ({"every": 60, "headers": ["a"]}, "mapping"),
    "headers not text": ({"every": 60, "headers": {"a": 1}}, "invalid settings of a schedule"),
    "headers of ours": ({"every": 60, "headers": {"heapline-schedule": "x"}}, "omit it"),
}


@pytest.mark.parametrize(("fields", "match"), REFUSED.values(), ids=REFUSED)
def test_bad_schedule_is_rejected_with_advice(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(BadRequest, match=match):
        make_schedule("nightly", topic="jobs", **fields)


@pytest.mark.parametrize("name", ["", "a b", "a/b/c", "/x", "-x", 7])
def test_bad_name_is_refused(name: Any) -> None:
    with pytest.raises(BadName, match="schedule name"):
        make_schedule(name, topic="jobs", every=60)


def test_bad_topic_is_refused() -> None:
    with pytest.raises(BadName, match="topic name"):
        make_schedule("nightly", topic="no topic", every=60)


def test_names_include_the_namespace() -> None:
    schedule = make_schedule("nightly", topic="jobs", every=timedelta(minutes=1))
    assert (schedule.name, schedule.topic, schedule.every_ms) == ("default/nightly", "default/jobs", 60_000)
    assert make_schedule("ns/nightly", topic="ns/jobs", every=60).name == "ns/nightly"


def test_firing_carries_its_settings_and_identity() -> None:
    schedule = make_schedule(
        "nightly", topic="jobs", every=60, payload=b"p", priority=3, key="k", headers={"a": "b"}, ttl=5.0, max_retries=2
    )
    message = schedule.message(1_770_000_000_123)
    assert (message.payload, message.priority, message.key, message.ttl, message.max_retries) == (b"p", 3, "k", 5.0, 2)
    assert message.headers == {
        "a": "b",
        "heapline-schedule": "default/nightly",
        "heapline-scheduled-at": "2026-02-02T02:40:00.123+00:00",
    }
    assert (message.seq, message.idempotency_key) == (1_770_000_000_123, None)
    assert message == schedule.message(1_770_000_000_123)
