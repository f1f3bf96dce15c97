"""Settings: the specified defaults, refused values, and names."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

import heapline
from heapline.contract.arguments import settings
from heapline.contract.config import (
    FIXED_FIELDS,
    check_config,
    check_features,
    feature_fields,
    make_broker_config,
    make_config,
    parse_topic,
)
from heapline.contract.keywords import GroupKeywords, ScheduleKeywords, TopicKeywords
from heapline.contract.schedules import CreateSchedule
from heapline.contract.topics import TopicSettings
from heapline.sql.config import make_sql_config
from heapline.wire.json import openapi


def test_defaults_of_a_topic_are_the_specified_ones() -> None:
    assert msgspec.structs.asdict(heapline.TopicConfig()) == {
        "mode": "min",
        "partitions": 1,
        "k": 1,
        "strategy": "best_first",
        "partition_weights": {},
        "max_staleness": 0.0,
        "min_freshness": 0.0,
        "ordering": "strict",
        "streams": True,
        "visibility_default": 30.0,
        "lease_max": 12 * 3600.0,
        "max_retries_default": 16,
        "backoff": heapline.Backoff(base=1.0, factor=2.0, max=600.0, jitter=0.2),
        "dlq": True,
        "dlq_retention": 30 * 86400.0,
        "dlq_max_letters": 0,
        "dlq_max_bytes": 0,
        "retention": 0.0,
        "retention_bytes": 0,
        "retention_margin": 0,
        "retention_hard_bytes": 0,
        "retention_hard_age": 0.0,
        "dedup_window": 24 * 3600.0,
        "max_payload_bytes": 1 << 20,
        "max_inflight": 0,
        "max_backlog": 0,
        "fairness": "none",
        "max_inflight_per_key": 0,
        "max_pops_per_second": 0.0,
        "segment_bytes": 64 << 20,
        "fsync": "commit",
        "fsync_interval": 0.05,
        "tick": 0.1,
        "compression": "none",
    }


def test_defaults_pass_their_own_checks() -> None:
    check_config(heapline.TopicConfig())
    check_config(heapline.GroupConfig())
    check_config(heapline.BrokerConfig())


def test_settings_are_frozen_and_keyword_only() -> None:
    for config in (heapline.TopicConfig(), heapline.BrokerConfig()):
        with pytest.raises(AttributeError):
            config.anything = 1  # type: ignore[union-attr]
    with pytest.raises(TypeError):
        heapline.TopicConfig("max")  # type: ignore[misc]


def test_keywords_override_the_base() -> None:
    base = make_config({"mode": "max", "max_backlog": 5})
    changed = make_config({"max_backlog": 6}, base)
    assert (changed.mode, changed.max_backlog) == ("max", 6)
    assert make_config({"backoff": heapline.Backoff(base=3.0)}).backoff.base == 3.0
    assert make_config({"backoff": {"base": 3.0}}).backoff == heapline.Backoff(base=3.0)
    assert make_config({"ordering": heapline.aging(2)}).ordering == heapline.Aging(2)
    assert make_config({"visibility_default": 5}).visibility_default == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "MIN"}, {"mode": None}, {"partitions": 1.5}, {"partitions": True}, {"dlq": 1}, {"streams": "no"},
        {"backoff": 5}, {"backoff": {"speed": 1}}, {"unknown": 1}, {"tick": float("nan")},
        {"max_payload_bytes": 600_000, "segment_bytes": 1 << 20}, {"fsync": ""},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_settings_raise_bad_request(fields: dict[str, Any]) -> None:
    with pytest.raises(heapline.BadRequest):
        make_config(fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"partitions": 3000}, "partitions must be an integer from 1 to 1024, got 3000"),
        ({"tick": 5}, "tick must be a number from 0.01 to 1, got 5"),
        ({"mode": "MIN"}, "mode must be one of 'max', 'min', got 'MIN'"),
        (
            {"ordering": "loose"},
            "ordering must be 'strict', or aging with a rate over 0 and at most 1000000, got",
        ),
        ({"ordering": heapline.aging(0)}, "ordering must be 'strict', or aging with a rate over 0"),
        ({"backoff": 5}, "backoff must be a Backoff with base, factor, max and jitter, got 5"),
        ({"max_pops_per_second": 0.0001}, "max_pops_per_second must be 0 or a number from 0.001 to 10000000"),
        ({"visibility_default": 9.0, "lease_max": 3.0}, "visibility_default must be at most lease_max, 3, got 9.0"),
        *(
            ({"partition_weights": weights}, "each key an integer from 0 to 1023 and each value a number from 0.001")
            for weights in ({2000: 1.0}, {1: 0.0})
        ),
    ],
    ids=str,
)
def test_invalid_setting_is_refused_with_the_command_s_message(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(heapline.BadRequest) as caught:
        make_config(fields)
    assert text in str(caught.value)


def test_keywords_of_a_method_are_refused_with_the_same_message() -> None:
    with pytest.raises(heapline.BadRequest, match="partitions must be an integer from 1 to 1024, got 3000"):
        settings("topic", {"partitions": 3000}, heapline.TopicConfig, TopicSettings)


@pytest.mark.parametrize(
    ("keywords", "config"), [(TopicKeywords, heapline.TopicConfig), (GroupKeywords, heapline.GroupConfig)]
)
def test_keywords_for_type_checkers_are_the_settings(keywords: Any, config: Any) -> None:
    assert get_type_hints(keywords) == get_type_hints(config)
    assert not keywords.__required_keys__


def test_keywords_of_a_schedule_are_the_other_fields_of_its_command() -> None:
    named = set(inspect.signature(heapline.Broker.create_schedule).parameters) - {"self", "more"}
    assert set(get_type_hints(ScheduleKeywords)) | named == set(CreateSchedule.__struct_fields__)
    assert not named & set(get_type_hints(ScheduleKeywords))


def test_only_the_contract_contains_the_default_namespace() -> None:
    package = Path(heapline.__file__).parent
    found = {str(p.relative_to(package)) for p in package.rglob("*.py") if '"default/' in p.read_text(encoding="utf-8")}
    assert found <= {
        "contract/config.py",
        "cli/journal/topic_files.py",
    }


def test_settings_have_bounds_in_openapi() -> None:
    properties = openapi()["components"]["schemas"]["TopicConfig"]["properties"]
    assert (properties["partitions"]["minimum"], properties["partitions"]["maximum"]) == (1, 1024)
    request = openapi()["components"]["schemas"]["CreateTopic"]["properties"]
    assert (request["tick"]["minimum"], request["tick"]["maximum"]) == (0.01, 1.0)


def test_error_does_not_repeat_a_url_with_a_password() -> None:
    with pytest.raises(heapline.BadRequest, match="redis must be a URL") as caught:
        make_sql_config(["postgresql://db"], {"redis": ["redis://:swordfish@db"]})
    assert "swordfish" not in str(caught.value)


def test_unknown_setting_error_lists_the_settings() -> None:
    with pytest.raises(heapline.BadRequest, match=r"'color'.*visibility_default"):
        make_config({"color": "red"})
    with pytest.raises(heapline.BadRequest, match=r"'color'.*cache_bytes"):
        make_broker_config({"color": "red"})


def test_every_accepted_config_survives_encoding() -> None:
    for config in (
        heapline.TopicConfig(), make_config({"ordering": heapline.aging(0.25), "mode": "max", "fsync": "interval"}),
        make_config({"backoff": heapline.Backoff(base=0.0, factor=1.0, max=0.0, jitter=1.0), "retention": 1e9}),
    ):  # fmt: skip
        assert msgspec.json.decode(msgspec.json.encode(config), type=heapline.TopicConfig) == config


def test_fixed_fields_are_fields() -> None:
    assert set(FIXED_FIELDS) <= set(heapline.TopicConfig.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "parts"),
    [("jobs", ("default", "jobs")), ("team/jobs", ("team", "jobs")), ("A.b-c_9", ("default", "A.b-c_9")),
     ("x" * 128, ("default", "x" * 128)), ("default/jobs", ("default", "jobs"))],
)  # fmt: skip
def test_valid_names_are_accepted(name: str, parts: tuple[str, str]) -> None:
    assert parse_topic(name) == parts


@pytest.mark.parametrize(
    "name", ["", "/", "a/", "/a", "a/b/c", "..", ".a", "-a", "a b", "a\n", "ä", "x" * 129, None, 5]
)
def test_invalid_names_are_rejected(name: Any) -> None:
    with pytest.raises(heapline.BadName, match="letters a-z"):
        parse_topic(name)


def test_settings_of_a_missing_feature_are_refused_by_name() -> None:
    check_features(heapline.TopicConfig(), {"queue"})
    check_features(make_config({"partitions": 3}), {"queue", "partitions"})
    with pytest.raises(heapline.Unsupported, match="partitions=3") as caught:
        check_features(make_config({"partitions": 3}), {"queue"})
    assert caught.value.feature == "partitions"


def test_every_feature_field_is_a_setting_of_a_topic() -> None:
    by_feature: dict[str, set[str]] = {}
    for name, feature in feature_fields().items():
        by_feature.setdefault(feature, set()).add(name)
    counts = {feature: len(names) for feature, names in by_feature.items()}
    assert counts == {"partitions": 5, "fairness": 3, "events": 1, "log": 10}
    assert {"partition_weights", "partitions"} < by_feature["partitions"]
