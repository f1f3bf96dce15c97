"""Settings of a node."""

from __future__ import annotations

from typing import Any

import pytest

from heapline.contract.errors import BadRequest
from heapline.sql.config import make_sql_config

URL = "postgresql://postgres@127.0.0.1/postgres"


def test_defaults() -> None:
    config = make_sql_config([URL], {})
    assert (config.postgres, config.schema, config.connections) == ((URL,), "heapline", 8)


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({}, "postgres"),
        ({"wal": "dir"}, "wal"),
        ({"wal": "dir", "durability": "wal"}, "wal"),
        ({"redis": "redis://h"}, "postgres"),
        ({"redis": "redis://h", "durability": "redis", "slow_mode": True}, "redis"),
    ],
)
def test_directory_for_a_log_decides_the_default_durability(fields: dict[str, Any], policy: str) -> None:
    assert make_sql_config([URL], fields).policy == policy


@pytest.mark.parametrize(
    ("postgres", "fields"),
    [
        ([], {}), (URL, {}), (["mysql://x"], {}), ([URL, URL], {}), ([7], {}), ([URL], {"schema": "a b"}),
        ([URL], {"schema": "Heap"}), ([URL], {"connections": 1}), ([URL], {"poll_interval": 0}),
        ([URL], {"redis": "http://x"}), ([URL], {"durability": "wal"}),
        ([URL], {"wal": "dir", "durability": "postgres"}), ([URL], {"durability": "disk"}),
        ([URL], {"wal": "dir", "wal_keep": -1}), ([URL], {"durability": "redis"}),
        ([URL], {"durability": "redis", "redis": "redis://h", "wal": "dir"}), ([URL], {"slow_mode": True}),
        ([URL], {"wal": "dir", "slow_mode": True}), ([URL], {"drain_seconds": -1}),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(postgres: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        make_sql_config(postgres, fields)


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:secret@h/db", "postgresql://u:secret/x@h/db", "postgresql://u:secret#x@h/db",
        "postgresql://u:x?secret@h/db", "postgresql://u:secret[x@h/db", "postgresql://u:secret@h:port/db",
        "postgresql://u:secret@h1:1,h2:2:3/db", "postgresql:///db?password=secret&port=x",
    ],
)  # fmt: skip
def test_error_does_not_show_a_url_with_its_password(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        make_sql_config([url], {})
    with pytest.raises(BadRequest) as also:
        make_sql_config([URL], {"redis": url.replace("postgresql:", "redis:")})
    for shown in (str(caught.value), str(also.value)):
        assert "secret" not in shown
        assert "URL" in shown


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:a%2Fb%40c@h:5432/db?sslmode=verify-full", "postgresql://u@h1:1,h2,[::1]:3/db", "postgresql:///db",
        "postgresql://u:p@/db?host=/run/postgresql", "postgresql://%2Frun%2Fpostgresql/db", "postgresql://[::1]/db",
    ],
)  # fmt: skip
def test_urls_that_the_driver_reads_are_accepted(url: str) -> None:
    assert make_sql_config([url], {}).postgres == (url,)


def test_printed_settings_do_not_show_passwords() -> None:
    config = make_sql_config(["postgresql://u:secret@h/db"], {"redis": "redis://:secret@h"})
    assert repr(config) == str(config) == "SqlConfig(1 shards, schema='heapline')"
