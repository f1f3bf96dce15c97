"""The settings of a topic as flags: one for each field of TopicConfig, and one for each field of its backoff.

This module knows how a setting is typed and described. TopicConfig decides, at the server, whether a value is valid.
A new field needs a line in the table below, which a test enforces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec

from heapline.cli.connection import OptionSet
from heapline.cli.output import size
from heapline.cli.units import duration, nbytes, option, pair, span
from heapline.contract.config import FIXED_FIELDS, Aging, Backoff, TopicConfig
from heapline.contract.errors import BadRequest

ORDER, DELIVERY, RETRIES, LIMITS, STORAGE = "Order", "Delivery", "Retries", "Limits", "Storage"
DEFAULTS = TopicConfig()
BACKOFF = "backoff_"
_FLAGS = {"ordering": "--aging", "partition_weights": "--partition-weight"}


class Setting(NamedTuple):
    name: str  # a field of the config, or backoff_ and a field of the backoff
    kind: Any
    panel: str
    help: str
    parser: Callable[[str], Any] | None = None
    metavar: str | None = None


def _duration(name: str, panel: str, help: str) -> Setting:
    return Setting(name, float, panel, help, duration, "DURATION")


def _size(name: str, panel: str, help: str) -> Setting:
    return Setting(name, int, panel, help, nbytes, "SIZE")


SETTINGS = (
    Setting("mode", str, ORDER, "Which priority is served first: the smallest or the largest.", None, "min|max"),
    Setting("ordering", float, ORDER, "How much more urgent waiting messages become per second.", None, "RATE"),
    Setting("fairness", str, ORDER, "keys: within a priority, fairness keys take turns.", None, "none|keys"),
    Setting("partitions", int, ORDER, "1 to 1024; can grow, never shrink. Order holds across all partitions."),
    Setting("k", int, ORDER, "A popped message is among the k best; 1 means exact order."),
    Setting("strategy", str, ORDER, "How pops choose partitions: best_first, round_robin or weighted. Only best_first "
            "keeps the order across partitions."),
    Setting("partition_weights", list[str], ORDER, "Share of a partition, such as 0=2.5, for --strategy weighted; "
            "repeatable.", None, "P=WEIGHT"),
    _duration("max_staleness", ORDER, "Age at which a partition's candidate is fetched again; 0 means no limit."),
    _duration("min_freshness", ORDER, "How long a new best message must be known before it is delivered."),
    _duration("visibility_default", DELIVERY, "Length of a lease if the pop does not set one."),
    _duration("lease_max", DELIVERY, "How long after its pop a lease can be extended."),
    Setting("max_inflight", int, DELIVERY, "Maximum number of leased messages; 0 means no limit."),
    Setting("max_inflight_per_key", int, DELIVERY, "Maximum number of leased messages per fairness key; needs "
            "--fairness keys."),
    Setting("max_pops_per_second", float, DELIVERY, "Maximum number of messages delivered per second; 0 means no "
            "limit."),
    Setting("max_retries_default", int, RETRIES, "Deliveries after the first until a message is dead; 0 to 250."),
    _duration("backoff_base", RETRIES, "Delay before the first retry."),
    Setting("backoff_factor", float, RETRIES, "Factor by which each further delay grows; 1 means constant."),
    _duration("backoff_max", RETRIES, "Longest delay."),
    Setting("backoff_jitter", float, RETRIES, "Random share of a delay; 0 to 1."),
    Setting("dlq", bool, RETRIES, "Keep dead messages, so that you can inspect and replay them."),
    Setting("max_backlog", int, LIMITS, "Maximum number of ready and delayed messages; 0 means no limit."),
    _size("max_payload_bytes", LIMITS, "Largest payload that is accepted."),
    _duration("dedup_window", LIMITS, "How long idempotency keys are remembered."),
    _duration("retention", STORAGE, "How long the journal of removed messages is kept; 0 means until reclaimed."),
    _size("retention_bytes", STORAGE, "Journal size above which the oldest of that is deleted; 0 means no limit."),
    Setting("retention_margin", int, STORAGE, "Rows to keep before the offset of the slowest group."),
    _size("retention_hard_bytes", STORAGE, "Journal size above which even unread rows are deleted; 0 means no limit."),
    _duration("retention_hard_age", STORAGE, "Age at which even unread rows are deleted; 0 means no limit."),
    _size("segment_bytes", STORAGE, "Size of a journal file, 1MiB to 1GiB."),
    Setting("fsync", str, STORAGE, "commit: acknowledged data is on disk. interval and os do not guarantee that."),
    _duration("fsync_interval", STORAGE, "Time between syncs, with --fsync interval."),
    _duration("tick", STORAGE, "How late an idle timer may fire, 10ms to 1s."),
    Setting("streams", bool, STORAGE, "Record which messages became due, so that groups can read the topic."),
)  # fmt: skip


def _options(updating: bool) -> dict[str, tuple[Any, Any]]:
    return {setting.name: (Annotated[setting.kind | None, _option(setting, updating)], None) for setting in SETTINGS}


def _option(setting: Setting, updating: bool) -> Any:
    flag = _FLAGS.get(setting.name, "--" + setting.name.replace("_", "-"))
    if setting.kind is bool:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    is_fixed = setting.name in FIXED_FIELDS
    help = setting.help
    if is_fixed:
        help += " Cannot be changed later."
    if not updating:
        help += f" \\[default: {shown(setting.name, as_settings(DEFAULTS)[setting.name])}]"
    return option(
        flag, help, panel=setting.panel, parser=setting.parser, metavar=setting.metavar, hidden=updating and is_fixed,
        show_default=False,
    )  # fmt: skip


def _given(**values: Any) -> dict[str, Any]:
    """Return the settings that were typed."""
    return {name: value for name, value in values.items() if value not in (None, [])}


def config_fields(settings: dict[str, Any], backoff: Backoff) -> dict[str, Any]:
    """Return the arguments of create_topic and update_topic. Fields of the backoff that are not given stay."""
    fields = {name: value for name, value in settings.items() if not name.startswith(BACKOFF)}
    parts = {name.removeprefix(BACKOFF): value for name, value in settings.items() if name.startswith(BACKOFF)}
    if parts:
        fields["backoff"] = msgspec.structs.replace(backoff, **parts)
    if "ordering" in fields:
        fields["ordering"] = Aging(fields["ordering"])
    if "partition_weights" in fields:
        fields["partition_weights"] = dict(_weight(text) for text in fields["partition_weights"])
    return fields


def _weight(text: str) -> tuple[int, float]:
    partition, weight = pair(text)
    try:
        return int(partition), float(weight)
    except ValueError:
        raise BadRequest(f"--partition-weight {text!r} is invalid; use PARTITION=WEIGHT, such as 0=2.5") from None


def as_settings(config: TopicConfig) -> dict[str, Any]:
    """Return every setting of a topic by its name in the table."""
    values = {s.name: getattr(config, s.name) for s in SETTINGS if not s.name.startswith(BACKOFF)}
    return values | {f"{BACKOFF}{name}": value for name, value in msgspec.structs.asdict(config.backoff).items()}


def shown(name: str, value: Any) -> str:
    """Return the value of a setting in the form in which it is typed."""
    parser = next(setting.parser for setting in SETTINGS if setting.name == name)
    if parser is duration:
        return span(value)
    if parser is nbytes:
        return size(value).replace(" ", "").replace(".0", "")
    if isinstance(value, Aging):
        return f"{value.rate:g} per second"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{partition}={weight:g}" for partition, weight in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


NEW_TOPIC = OptionSet(_options(updating=False), _given)
#: Flags of fixed settings are hidden in --help but accepted, so that the topic explains why they cannot change.
CHANGED_TOPIC = OptionSet(_options(updating=True), _given)
