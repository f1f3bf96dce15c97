"""The options of a read: names, defaults and checks. Most are those of Spark's Kafka source.

Spark passes every option as a string and ignores the case of names. An unknown option is rejected, because a misspelled
one would silently do nothing. Only syntax is checked here; offsets.py resolves what an option means for a topic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from heapline.contract.config import NAME, canonical_topic
from heapline.contract.errors import BadRequest
from heapline.spark.schema import STATE_VIEWS, VIEWS, Column, columns_of

#: Starting a task costs Spark about 50 ms, enough to read 20 MB. Pieces of 8, 16, 32 and 64 MiB read 58 MB of log on
#: two busy cores in 0.73, 0.49, 0.43 and 0.38 s (the same rows as Parquet: 0.40 s).
PIECE_BYTES = 64 << 20
EARLIEST, LATEST = "earliest", "latest"
BEGIN, END = -2, -1  # earliest and latest in JSON, as in Kafka

_WHERE = ("subscribe", "subscribepattern", "assign")
_STARTS = ("startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp")
_ENDS = ("endingoffsets", "endingtimestamp", "endingoffsetsbytimestamp")
#: Names as users write them, for messages. They are compared in lower case.
NAMES = (
    "path", "heapline.url", "heapline.api_key", "heapline.api_key_file", "heapline.token", "view", "columns",
    "subscribe", "subscribePattern", "assign", "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy", "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp",
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "maxPartitionBytes",
    "failOnDataLoss", "includeHeaders", "leaseSeconds", "pushdown", "group",
)  # fmt: skip
_KNOWN = {name.lower(): name for name in NAMES}
_SPAN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|[a-z]*?)s?\s*", re.IGNORECASE)
_SPANS = {
    "ms": 0.001, "millisecond": 0.001, "": 1.0, "s": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0,
    "h": 3600.0, "hour": 3600.0, "d": 86400.0, "day": 86400.0,
}  # fmt: skip


@dataclass(frozen=True)
class Positions:
    """The start or end of a read: a word or a time for all partitions, or offsets or times (ms) per partition."""

    word: str | None = None
    offsets: dict[str, dict[int, int]] | None = None
    time: int | None = None
    times: dict[str, dict[int, int]] | None = None


@dataclass(frozen=True)
class TopicSelection:
    """The topics and partitions that a read selects. Exactly one field is set."""

    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    assign: dict[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Target:
    """The location of the log: a directory, or a server and its key."""

    path: str | None = None
    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    ca_file: str | None = None  # trusted certificates for TLS; from the environment

    @classmethod
    def of(cls, given: Mapping[str, str], path: str | None = None) -> Target:
        """Return the target that options (with lower-case names) describe."""
        key = given.get("heapline.api_key", given.get("heapline.token"))
        return cls(path, given.get("heapline.url"), key, given.get("heapline.api_key_file"))


@dataclass(frozen=True)
class ReadOptions:
    target: Target
    selection: TopicSelection
    view: str
    columns: tuple[Column, ...]
    start: Positions
    end: Positions
    start_late: str  # "error" or "latest": the meaning of a starting time after the last row
    max_rows: int | None
    min_rows: int | None
    max_delay: float
    pieces_min: int
    piece_bytes: int
    fail_on_loss: bool
    lease_seconds: float
    pushdown: bool
    group: str | None = None  # the observer group that shows a stream's progress


def parse_columns(options: Mapping[str, str]) -> tuple[Column, ...]:
    """Return only the columns. Spark requests these before it is known whether a batch or a stream is read."""
    return _columns({name.lower(): value for name, value in options.items()})[1]


def _columns(given: dict[str, str]) -> tuple[str, tuple[Column, ...]]:
    view = given.get("view", "messages")
    if view not in VIEWS:
        raise BadRequest(f"view must be one of {', '.join(VIEWS)}, not {view!r}")
    wanted = given.get("columns")
    names = None if wanted is None else tuple(name.strip() for name in wanted.split(","))
    return view, columns_of(view, names, parse_flag(given, "includeheaders", False))


def parse_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        if name not in _KNOWN:
            raise BadRequest(f"unknown option {name!r} for reading; use {', '.join(NAMES)}")
    view, columns = _columns(given)
    if view in STATE_VIEWS:
        _check_state_view(given, view, streaming)
    if streaming and (found := [name for name in _ENDS if name in given]):
        raise BadRequest(f"a stream has no end; omit {_KNOWN[found[0]]}")
    default = LATEST if streaming else EARLIEST
    return ReadOptions(
        target=_target(given),
        selection=_selection(given),
        view=view,
        columns=columns,
        start=_positions(given, _STARTS, default, LATEST if not streaming else None),
        end=_positions(given, _ENDS, LATEST, EARLIEST),
        start_late=_choice(given, "startingoffsetsbytimestampstrategy", ("error", "latest")),
        max_rows=_count(given, "maxoffsetspertrigger"),
        min_rows=_count(given, "minoffsetspertrigger"),
        max_delay=_span(given.get("maxtriggerdelay", "15m")),
        pieces_min=_count(given, "minpartitions") or 1,
        piece_bytes=_count(given, "maxpartitionbytes") or PIECE_BYTES,
        fail_on_loss=parse_flag(given, "failondataloss", True),
        lease_seconds=float(_count(given, "leaseseconds") or 600),
        pushdown=parse_flag(given, "pushdown", False),
        group=_group(given, streaming),
    )


def _check_state_view(given: dict[str, str], view: str, streaming: bool) -> None:
    if streaming:
        raise BadRequest(f"the view {view} shows one point in time and is batch only; streams read messages or events")
    if found := [name for name in (*_STARTS, *_ENDS) if name in given]:
        raise BadRequest(f"the view {view} shows the time at which it is planned; omit {_KNOWN[found[0]]}")


def _group(given: dict[str, str], streaming: bool) -> str | None:
    group = given.get("group")
    if group is None:
        return None
    if not streaming or "path" in given:
        raise BadRequest("group shows the progress of a stream that reads from a server; omit it here")
    if not NAME.match(group):
        raise BadRequest(f"group={group!r} is not a valid name; use letters, digits, ., _ and -")
    return group


def _target(given: dict[str, str]) -> Target:
    path, url = given.get("path"), given.get("heapline.url")
    if path is not None and url is not None:
        raise BadRequest("set path or heapline.url, not both; rows are read from a directory or from a server")
    return Target.of(given, path)


def _selection(given: dict[str, str]) -> TopicSelection:
    found = [name for name in _WHERE if name in given]
    if len(found) != 1:
        raise BadRequest("no topics selected; set exactly one of subscribe, subscribePattern and assign")
    value = given[found[0]]
    if found[0] == "subscribe":
        topics = tuple(dict.fromkeys(canonical_topic(name.strip()) for name in value.split(",") if name.strip()))
        if not topics:
            raise BadRequest("subscribe does not name a topic")
        return TopicSelection(topics=topics)
    if found[0] == "subscribepattern":
        try:
            re.compile(value)
        except re.error as error:
            raise BadRequest(f"subscribePattern={value!r} is not a regular expression: {error}") from None
        return TopicSelection(pattern=value)
    parsed = _json("assign", value)
    form = 'assign must be JSON such as {"orders": [0, 1]}'
    if not isinstance(parsed, dict) or not parsed:
        raise BadRequest(form)
    for numbers in parsed.values():
        if not isinstance(numbers, list) or not numbers or not all(type(n) is int and n >= 0 for n in numbers):
            raise BadRequest(form)
    return TopicSelection(assign={canonical_topic(t): tuple(sorted(set(numbers))) for t, numbers in parsed.items()})


def _positions(given: dict[str, str], names: tuple[str, ...], default: str, refused: str | None) -> Positions:
    by_offset, by_time, by_times = names
    found = [name for name in names if name in given]
    # If several are set, Kafka's source prefers one time, then times, then offsets.
    if by_time in found:
        return Positions(time=_ms(_KNOWN[by_time], given[by_time]))
    if by_times in found:
        return Positions(times=_by_partition(_KNOWN[by_times], given[by_times], low=0))
    if by_offset not in found:
        return Positions(word=default)
    value, name = given[by_offset].strip(), _KNOWN[by_offset]
    if value.lower() in (EARLIEST, LATEST):
        if value.lower() == refused:
            raise BadRequest(f"{name}={value} would read nothing; a batch reads from earliest to latest")
        return Positions(word=value.lower())
    offsets = _by_partition(name, value, low=BEGIN)
    never = END if refused == LATEST else BEGIN if refused == EARLIEST else None
    if any(offset == never for parts in offsets.values() for offset in parts.values()):
        raise BadRequest(f"{name}: {never} means {refused}, which a batch cannot use here")
    return Positions(offsets=offsets)


def _by_partition(name: str, value: str, low: int) -> dict[str, dict[int, int]]:
    parsed = _json(name, value)
    form = f'{name} must be "earliest", "latest" or JSON such as {{"orders": {{"0": 23, "1": {low}}}}}'
    if not isinstance(parsed, dict):
        raise BadRequest(form)
    found: dict[str, dict[int, int]] = {}
    for topic, parts in parsed.items():
        if not isinstance(parts, dict):
            raise BadRequest(form)
        # Offsets of a checkpoint can be used unchanged; their incarnation is ignored.
        numbers = {p: o for p, o in parts.items() if p != INCARNATION}
        for partition, offset in numbers.items():
            if not partition.isdigit() or type(offset) is not int or offset < low:
                raise BadRequest(form)
        found[canonical_topic(topic)] = {int(p): o for p, o in numbers.items()}
    return found


INCARNATION = "incarnation"


def _json(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRequest(f"{name} is not JSON: {error}") from None


def _ms(name: str, value: str) -> int:
    if not value.strip().isdigit():
        raise BadRequest(f"{name} must be a number of milliseconds since 1970, not {value!r}")
    return int(value)


def _count(given: dict[str, str], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not value.strip().isdigit() or int(value) == 0:
        raise BadRequest(f"{_KNOWN[name]} must be an integer over 0, not {value!r}")
    return int(value)


def parse_flag(given: Mapping[str, str], name: str, default: bool, names: Mapping[str, str] = _KNOWN) -> bool:
    """Parse a boolean option. `names` maps lower-case names to their spelling in messages."""
    value = given.get(name, str(default)).strip().lower()
    if value not in ("true", "false"):
        raise BadRequest(f"{names[name]} must be true or false, not {value!r}")
    return value == "true"


def _choice(given: dict[str, str], name: str, words: tuple[str, ...]) -> str:
    value = given.get(name, words[0]).strip().lower()
    if value not in words:
        raise BadRequest(f"{_KNOWN[name]} must be one of {', '.join(words)}, not {value!r}")
    return value


def _span(value: str) -> float:
    """Parse a duration.

    >>> _span("15m"), _span("200ms"), _span("3 seconds")
    (900.0, 0.2, 3.0)
    """
    match = _SPAN.fullmatch(value)
    unit = match[2].lower() if match else None
    if match is None or unit not in _SPANS:
        raise BadRequest(f"maxTriggerDelay must be a duration such as 15m or 200ms, not {value!r}")
    return float(match[1]) * _SPANS[unit]
