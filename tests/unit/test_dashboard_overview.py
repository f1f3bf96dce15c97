"""The health of the server on the overview: disk, journal and lag, and when each is an alarm."""

from __future__ import annotations

import msgspec

from heapline.contract.message import LatencyHistogram, TopicStats
from heapline.dashboard.pages.overview import DISK_MIN, disk_alarms, health_of
from tests.unit.cli.top.rig import stats


def with_disk(topic: str, free: int | None, journal: int, late: int = 0) -> TopicStats:
    made = stats(topic, latencies={"late": LatencyHistogram(bounds_ms=[1.0, 2000.0], counts=[9, late, 0], sum_ms=0.0)})
    assert made.log is not None
    log = msgspec.structs.replace(made.log, disk_free_bytes=free, journal_bytes=journal, journal_segments=2)
    return msgspec.structs.replace(made, log=log)


def test_health_names_disk_journal_and_the_topic_that_lags_most() -> None:
    facts = {fact.label: fact for fact in health_of([with_disk("a", 5 << 30, 1000), with_disk("b", 5 << 30, 500, 9)])}
    assert facts["Disk free"].value == "5.4\xa0GB"
    assert (facts["Journal"].value, facts["Journal"].detail) == ("1.5\xa0kB", "in 4 segments")
    assert facts["Timer lag"].detail == "p95 in b"
    assert (facts["Timer lag"].is_bad, facts["Disk free"].is_bad) == (True, False)


def test_disk_that_may_soon_be_full_is_an_alarm_at_the_largest_journal() -> None:
    assert disk_alarms([with_disk("a", DISK_MIN, 1000)]) == []
    for free, journal in ((DISK_MIN - 1, 1000), (2 * DISK_MIN, 21 * DISK_MIN)):
        (alarm,) = disk_alarms([with_disk("a", free, 10), with_disk("b", free, journal)])
        assert (alarm.topic, alarm.rank) == ("b", 0)
        assert "the disk has only" in alarm.text


def test_broker_without_a_journal_shows_no_health_of_its_disk() -> None:
    assert health_of([stats(log=None)]) == []
    assert disk_alarms([with_disk("a", None, 1000)]) == []
