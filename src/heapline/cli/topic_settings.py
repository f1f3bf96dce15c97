"""A topic's settings as flags: one for each field of TopicConfig, those of its back-off apart.

What is here is how a setting is typed and what people are told about it. Whether a value is good is TopicConfig's to
say, at the server: a new field needs a line in the table below (a test sees to it), and no rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from heapline.cli.present import size
from heapline.cli.units import duration, nbytes, pair, span
from heapline.config import FIXED_FIELDS, Aging, Backoff, TopicConfig
from heapline.errors import BadRequest

ORDER, DELIVERY, RETRIES, LIMITS, STORAGE = "Order", "Delivery", "Retries", "Limits", "Storage"
DEFAULTS = TopicConfig()
BACKOFF = "backoff_"


class Setting(NamedTuple):
    name: str  # the field, or backoff_ and a field of the back-off
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
    Setting("ordering", float, ORDER, "Waiting messages grow more urgent by this much a second.", None, "RATE"),
    Setting("fairness", str, ORDER, "keys: within a priority the fairness keys take turns.", None, "none|keys"),
    Setting("partitions", int, ORDER, "1 to 1024; can grow, never shrink. Order holds over all of them."),
    Setting("k", int, ORDER, "A popped message is among the k best; 1 is exact order."),
    Setting(
        "strategy", str, ORDER, "How pops choose among partitions: best_first, round_robin or weighted; only the first "
        "keeps the order over all.",
    ),
    Setting(
        "partition_weights", list[str], ORDER, "A partition's share, as 0=2.5, with --strategy weighted; repeatable.",
        None, "P=WEIGHT",
    ),
    _duration("max_staleness", ORDER, "After this a partition's candidate is asked for again; 0 is no limit."),
    _duration("min_freshness", ORDER, "How long a new best message must stand before it is handed out."),
    _duration("visibility_default", DELIVERY, "How long a popped message is leased when the pop does not say."),
    _duration("lease_max", DELIVERY, "How long after its pop a lease can be extended."),
    Setting("max_inflight", int, DELIVERY, "Leased messages at once; 0 is no limit."),
    Setting("max_inflight_per_key", int, DELIVERY, "The same for one fairness key; needs --fairness keys."),
    Setting("max_pops_per_second", float, DELIVERY, "Messages handed out a second; 0 is no limit."),
    Setting("max_retries_default", int, RETRIES, "Deliveries after the first before a message is dead; 0 to 250."),
    _duration("backoff_base", RETRIES, "The wait before the first retry."),
    Setting("backoff_factor", float, RETRIES, "How much longer each next wait is; 1 is the same."),
    _duration("backoff_max", RETRIES, "The longest wait."),
    Setting("backoff_jitter", float, RETRIES, "The share of a wait that is random; 0 to 1."),
    Setting("dlq", bool, RETRIES, "Keep dead messages, to look at and replay them; or drop them."),
    Setting("max_backlog", int, LIMITS, "Ready and delayed messages; 0 is no limit."),
    _size("max_payload_bytes", LIMITS, "A larger payload is refused."),
    _duration("dedup_window", LIMITS, "How long idempotency keys are remembered."),
    _duration("retention", STORAGE, "How long the journal of messages that are gone is kept; 0: until reclaimed."),
    _size("retention_bytes", STORAGE, "How large the journal gets before the oldest of that goes; 0: no limit."),
    Setting("retention_margin", int, STORAGE, "Rows to keep below the place of the last group that holds the journal."),
    _size("retention_hard_bytes", STORAGE, "The size above which even what groups have not read goes; 0: no limit."),
    _duration("retention_hard_age", STORAGE, "The age at which even what groups have not read goes; 0: no limit."),
    _size("segment_bytes", STORAGE, "Size of a journal file, 1MiB to 1GiB."),
    Setting(
        "fsync", str, STORAGE, "commit: what is answered is on disk; interval and os give that promise up.",
    ),
    _duration("fsync_interval", STORAGE, "Between syncs, with --fsync interval."),
    _duration("tick", STORAGE, "How late a timer may be when idle, 10ms to 1s."),
    Setting("streams", bool, STORAGE, "Record what fell due, so that groups can follow the topic."),
)  # fmt: skip
#: Where a flag is not simply the field's name.
_FLAGS = {"ordering": "--aging", "partition_weights": "--partition-weight"}


def with_settings(*, updating: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the flags to a command, which gets those that were given as one dict, `settings`.

    For an update those of settings that are fixed are left out of --help, but taken, so that the topic says why not.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "settings"]

        async def run(*args: Any, **given: Any) -> None:
            settings = {s.name: value for s in SETTINGS if (value := given.pop(s.name)) not in (None, [])}
            await command(*args, settings=settings, **given)

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__signature__ = signature.replace(parameters=own + [_parameter(s, updating) for s in SETTINGS])  # type: ignore[attr-defined]
        return run

    return add


def _parameter(setting: Setting, updating: bool) -> inspect.Parameter:
    flag = _FLAGS.get(setting.name, "--" + setting.name.replace("_", "-"))
    if setting.kind is bool:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    fixed = setting.name in FIXED_FIELDS
    told = setting.help
    if fixed:
        told += " Cannot be changed later."
    if not updating:
        told += f" \\[default: {shown(setting.name, _default(setting.name))}]"
    option = typer.Option(
        flag, help=told, parser=setting.parser, metavar=setting.metavar, rich_help_panel=setting.panel,
        hidden=updating and fixed, show_default=False,
    )  # fmt: skip
    annotation: Any = Annotated[setting.kind | None, option]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default(name: str) -> Any:
    if name.startswith(BACKOFF):
        return getattr(DEFAULTS.backoff, name.removeprefix(BACKOFF))
    return getattr(DEFAULTS, name)


def config_fields(settings: dict[str, Any], backoff: Backoff) -> dict[str, Any]:
    """What create_topic and update_topic take; a back-off that is given in part keeps the rest of `backoff`."""
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
        raise BadRequest(f"--partition-weight {text!r}: write PARTITION=WEIGHT, as in 0=2.5") from None


def as_settings(config: TopicConfig) -> dict[str, Any]:
    """Every setting of a topic by the name it has here."""
    return {
        s.name: getattr(config.backoff, s.name.removeprefix(BACKOFF))
        if s.name.startswith(BACKOFF) else getattr(config, s.name)
        for s in SETTINGS
    }  # fmt: skip


def shown(name: str, value: Any) -> str:
    """A setting's value as it would be typed."""
    parser = next(setting.parser for setting in SETTINGS if setting.name == name)
    if parser is duration:
        return span(value)
    if parser is nbytes:
        return size(value).replace(" ", "").replace(".0", "")
    if isinstance(value, Aging):
        return f"{value.rate:g} a second"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{partition}={weight:g}" for partition, weight in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
