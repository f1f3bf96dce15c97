"""The settings of a topic as flags: one for each field of TopicConfig, and one for each field of its backoff.

This module knows how a setting is typed and described. TopicConfig decides, at the server, whether a value is valid.
A new field needs a line in the table below, which a test enforces.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from heapline.cli.options import Panel, Seconds, Size, Value, with_signature
from heapline.cli.output import size
from heapline.cli.units import pair, span
from heapline.contract.config import FIXED_FIELDS, Aging, Backoff, TopicConfig
from heapline.contract.errors import BadRequest

DEFAULTS = TopicConfig()
BACKOFF = "backoff_"
_FLAGS = {"ordering": "--aging", "partition_weights": "--partition-weight"}


class Setting(NamedTuple):
    name: str  # a field of the config, or backoff_ and a field of the backoff
    kind: Any  # the annotation of an option's value
    help: str
    panel: Panel


#: Panel -> name, the annotation of the option's value, and help. A name is a field of the config, or of its backoff.
_TABLE: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "Order": (
        ("mode", Annotated[str, Value("min|max")], "Which priority is served first: the smallest or the largest."),
        ("ordering", Annotated[float, Value("RATE")], "How much more urgent waiting messages become per second."),
        ("fairness", Annotated[str, Value("none|keys")], "keys: within a priority, fairness keys take turns."),
        ("partitions", int, "1 to 1024; can grow, never shrink. Order holds across all partitions."),
        ("k", int, "A popped message is among the k best; 1 means exact order."),
        ("strategy", str, "How pops choose partitions: best_first, round_robin or weighted. Only best_first keeps "
         "the order across partitions."),
        ("partition_weights", Annotated[list[str], Value("P=WEIGHT")], "Share of a partition, such as 0=2.5, for "
         "--strategy weighted; repeatable."),
        ("max_staleness", Seconds, "Age at which a partition's candidate is fetched again; 0 means no limit."),
        ("min_freshness", Seconds, "How long a new best message must be known before it is delivered."),
    ),
    "Delivery": (
        ("visibility_default", Seconds, "Length of a lease if the pop does not set one."),
        ("lease_max", Seconds, "How long after its pop a lease can be extended."),
        ("max_inflight", int, "Maximum number of leased messages; 0 means no limit."),
        ("max_inflight_per_key", int, "Maximum number of leased messages per fairness key; needs --fairness keys."),
        ("max_pops_per_second", float, "Maximum number of messages delivered per second; 0 means no limit."),
    ),
    "Retries": (
        ("max_retries_default", int, "Deliveries after the first until a message is dead; 0 to 250."),
        ("backoff_base", Seconds, "Delay before the first retry."),
        ("backoff_factor", float, "Factor by which each further delay grows; 1 means constant."),
        ("backoff_max", Seconds, "Longest delay."),
        ("backoff_jitter", float, "Random share of a delay; 0 to 1."),
        ("dlq", bool, "Keep dead messages, so that you can inspect and replay them."),
    ),
    "Limits": (
        ("max_backlog", int, "Maximum number of ready and delayed messages; 0 means no limit."),
        ("max_payload_bytes", Size, "Largest payload that is accepted."),
        ("dedup_window", Seconds, "How long idempotency keys are remembered."),
    ),
    "Storage": (
        ("retention", Seconds, "How long the journal of removed messages is kept; 0 means until reclaimed."),
        ("retention_bytes", Size, "Journal size above which the oldest of that is deleted; 0 means no limit."),
        ("retention_margin", int, "Rows to keep before the offset of the slowest group."),
        ("retention_hard_bytes", Size, "Journal size above which even unread rows are deleted; 0 means no limit."),
        ("retention_hard_age", Seconds, "Age at which even unread rows are deleted; 0 means no limit."),
        ("segment_bytes", Size, "Size of a journal file, 1MiB to 1GiB."),
        ("fsync", str, "commit: acknowledged data is on disk. interval and os do not guarantee that."),
        ("fsync_interval", Seconds, "Time between syncs, with --fsync interval."),
        ("tick", Seconds, "How late an idle timer may fire, 10ms to 1s."),
        ("streams", bool, "Record which messages became due, so that groups can read the topic."),
    ),
}  # fmt: skip
SETTINGS = [Setting(*row, Panel(panel)) for panel, rows in _TABLE.items() for row in rows]


def _options(updating: bool) -> dict[str, tuple[Any, Any]]:
    return {setting.name: (_annotation(setting, updating), None) for setting in SETTINGS}


def _annotation(setting: Setting, updating: bool) -> Any:
    flag = _FLAGS.get(setting.name, "--" + setting.name.replace("_", "-"))
    if setting.kind is bool:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    is_fixed = setting.name in FIXED_FIELDS
    help = setting.help
    if is_fixed:
        help += " Cannot be changed later."
    if not updating:
        help += f" \\[default: {shown(setting.name, as_settings(DEFAULTS)[setting.name])}]"
    more = {"hidden": updating and is_fixed, "show_default": False}
    return Annotated[setting.kind | None, flag, help, setting.panel, more]


def _given(values: dict[str, Any]) -> dict[str, Any]:
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
    kind = next(setting.kind for setting in SETTINGS if setting.name == name)
    if kind is Seconds:
        return span(value)
    if kind is Size:
        return size(value).replace(" ", "").replace(".0", "")
    if isinstance(value, Aging):
        return f"{value.rate:g} per second"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{partition}={weight:g}" for partition, weight in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


new_topic = with_signature(lambda **values: _given(values), _options(updating=False))
#: Flags of fixed settings are hidden in --help but accepted, so that the topic explains why they cannot change.
changed_topic = with_signature(lambda **values: _given(values), _options(updating=True))
