"""Config accepts durations in either form, rejects invalid settings, and comes with three examples."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.assign.config import EXAMPLES, AssignmentConfig, Config, RetryConfig, example_text, seconds
from heapline.assign.errors import BadConfig

#: The specification's table of defaults.
DEFAULTS = {
    "worker_id_prefix": "worker", "worker_id_min": 0, "worker_id_max": 99, "worker_id_ttl": "30s",
    "heartbeat_interval": "2s", "heartbeat_ttl": "6s", "cold_start_window": "30s", "planned_scale_window": "10s",
    "restart_detection_ratio": 0.5, "operation_timeout": "10s", "election_timeout": "5s", "startup_timeout": "30s",
    "shutdown_timeout": "10s", "assignment": {"min_rebalance_threshold": 0.15, "rebalance_cooldown": "10s"},
}  # fmt: skip


def test_defaults_are_those_of_the_specification() -> None:
    assert Config.from_dict(DEFAULTS) == Config() == Config.from_yaml("")
    assert DEFAULTS.keys() | {"retry"} == {each.name for each in dataclasses.fields(Config)}
    assert RetryConfig() == RetryConfig(max_retries=3, initial_delay="1s", max_delay="30s", backoff=2.0)


# --- durations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [("30s", 30.0), ("250ms", 0.25), ("1m30s", 90.0), ("1.5h", 5400.0), ("1d", 86400.0), (" 2s ", 2.0), (6, 6.0),
     (0.5, 0.5), (0, 0.0)],
)  # fmt: skip
def test_duration_is_read_as_seconds(given: object, expected: float) -> None:
    assert seconds(given) == expected


@pytest.mark.parametrize(
    "given",
    ["", "30", "s", "30 s", "30x", "-5s", "1s junk", "1e3s", None, True, [], -1, float("inf"), float("nan"), "9999d"],
)  # fmt: skip
def test_invalid_duration_is_rejected_naming_the_field(given: object) -> None:
    with pytest.raises(BadConfig, match="cold_start_window="):
        Config(cold_start_window=given)  # type: ignore[arg-type]


@given(st.integers(0, 10**9))
def test_duration_of_milliseconds_is_exact_to_a_microsecond(ms: int) -> None:
    assert abs(seconds(f"{ms}ms") - ms / 1000) < 1e-6


def test_duration_can_be_replaced_but_not_assigned() -> None:
    config = dataclasses.replace(Config(), heartbeat_ttl="8s")
    assert config.heartbeat_ttl == 8.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.heartbeat_ttl = 9  # type: ignore[misc]


# --- rejected settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"worker_id_prefix": ""}, "worker_id_prefix"),
        ({"worker_id_prefix": "a.b"}, "worker_id_prefix"),
        ({"worker_id_prefix": 7}, "worker_id_prefix"),
        ({"worker_id_min": -1}, "worker_id_min"),
        ({"worker_id_max": "9"}, "worker_id_max"),
        ({"worker_id_min": 5, "worker_id_max": 4}, "worker_id_max=4 must be a whole number from 5"),
        ({"heartbeat_interval": 0}, "heartbeat_interval must be greater than 0"),
        ({"heartbeat_interval": "4s"}, "at least twice heartbeat_interval"),
        ({"worker_id_ttl": "5s"}, "worker_id_ttl=5 must not be less than heartbeat_ttl=6"),
        ({"restart_detection_ratio": 1.1}, "restart_detection_ratio"),
        ({"restart_detection_ratio": float("nan")}, "restart_detection_ratio"),
        ({"operation_timeout": 0}, "operation_timeout"),
        ({"startup_timeout": "0s"}, "startup_timeout"),
        ({"heartbeat": "2s"}, "config has no field heartbeat; its fields are worker_id_prefix"),
        ({"assignment": {"cooldown": 1}}, "assignment has no field cooldown"),
        ({"assignment": {"min_rebalance_threshold": -0.1}}, "min_rebalance_threshold"),
        ({"assignment": 5}, "assignment must be a mapping of names to values"),
        ({"retry": {"max_retries": -1}}, "max_retries"),
        ({"retry": {"backoff": 0.5}}, "backoff"),
        ({"retry": {"initial_delay": "1m"}}, "initial_delay=60 must not exceed max_delay=30"),
    ],
)
def test_invalid_config_is_rejected_with_the_reason(values: dict[str, object], fault: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(fault)):
        Config.from_dict(values)


def test_nested_configs_are_objects_or_come_from_from_dict() -> None:
    assert Config.from_dict({"retry": RetryConfig(max_retries=9)}).retry.max_retries == 9
    with pytest.raises(BadConfig, match=r"assignment must be AssignmentConfig"):
        Config(assignment={})  # type: ignore[arg-type]


# --- YAML -------------------------------------------------------------------------------------------------------------


def test_config_is_read_from_text_and_from_a_file(tmp_path: Path) -> None:
    text = 'heartbeat_ttl: "9s"\nheartbeat_interval: 3\nassignment: {rebalance_cooldown: 1m}\n'
    (tmp_path / "config.yaml").write_text(text)
    expected = Config(heartbeat_ttl=9, heartbeat_interval=3, assignment=AssignmentConfig(rebalance_cooldown=60))
    assert Config.from_yaml(text) == Config.from_yaml(tmp_path / "config.yaml") == expected


def test_config_round_trips_through_to_dict() -> None:
    config = Config.example("high_churn")
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("text", ["a: [", "- 1", "just text", "!!python/object:os.system {}"])
def test_invalid_yaml_is_rejected(text: str) -> None:
    with pytest.raises(BadConfig):
        Config.from_yaml(text)


def test_unreadable_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"cannot read .*none\.yaml"):
        Config.from_yaml(tmp_path / "none.yaml")


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_names_every_field_but_retry(name: str) -> None:
    import yaml

    values = yaml.safe_load(example_text(name))
    assert values.keys() == DEFAULTS.keys()
    assert Config.example(name) == Config.from_dict(values)


def test_examples_are_those_of_the_specification() -> None:
    development, production, churn = (Config.example(name) for name in EXAMPLES)
    assert production == dataclasses.replace(Config(), worker_id_max=199)
    assert development == Config(
        worker_id_prefix="dev-worker", worker_id_max=2, worker_id_ttl=10, heartbeat_interval=1, heartbeat_ttl=3,
        cold_start_window=5, planned_scale_window=2, operation_timeout=5, election_timeout=3, startup_timeout=15,
        shutdown_timeout=5, assignment=AssignmentConfig(min_rebalance_threshold=0.1, rebalance_cooldown=2),
    )  # fmt: skip
    assert churn == Config(
        worker_id_prefix="dynamic-worker", worker_id_max=499, worker_id_ttl=20, heartbeat_interval=1, heartbeat_ttl=4,
        cold_start_window=20, planned_scale_window=5, restart_detection_ratio=0.3, operation_timeout=8,
        election_timeout=4, startup_timeout=25, shutdown_timeout=8,
        assignment=AssignmentConfig(min_rebalance_threshold=0.2, rebalance_cooldown=5),
    )  # fmt: skip


def test_unknown_example_is_rejected_listing_the_existing_ones() -> None:
    with pytest.raises(BadConfig, match="development, production, high_churn"):
        Config.example("../../secret")


def test_example_configs_are_all_named() -> None:
    folder = Path(__file__).parents[3] / "src" / "heapline" / "assign" / "examples"
    assert {path.name for path in folder.iterdir()} == {f"{name}.yaml" for name in EXAMPLES}


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_worker_ids_are_in_the_order_in_which_they_are_tried() -> None:
    assert list(Config(worker_id_prefix="w", worker_id_min=9, worker_id_max=11).worker_ids()) == ["w-9", "w-10", "w-11"]


def test_retry_delays_grow_up_to_max_delay() -> None:
    retry = RetryConfig(initial_delay="1s", max_delay="5s", backoff=2)
    assert [retry.delay(n) for n in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert RetryConfig(backoff=1000).delay(10**9) == 30.0
