"""The sources of `load`: which format a file has, and which sources are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from heapline.contract.errors import BadRequest
from heapline.spark.jobs.load import kind_of, read_table


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.parquet", "parquet"), ("a.JSONL", "json"), ("a.csv.gz", "csv"), ("a.txt", "text"), ("s3://b/c.orc", "orc")],
)
def test_format_follows_the_extension(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_directory_has_the_format_of_its_files_or_is_a_delta_table(tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    (tmp_path / "day=1" / "part.parquet").touch()
    (tmp_path / "_SUCCESS").touch()
    assert kind_of(str(tmp_path)) == "parquet"
    (tmp_path / "more.csv").touch()
    with pytest.raises(BadRequest, match="several formats"):
        kind_of(str(tmp_path))
    (tmp_path / "_delta_log").mkdir()
    assert kind_of(str(tmp_path)) == "delta"


def test_missing_or_unknown_files_are_rejected_before_spark_runs(tmp_path: Path) -> None:
    for paths, why in (
        ([], "nothing to read"),
        ([tmp_path / "no.parquet"], "does not exist"),
        ([Path(__file__)], "does not have a known extension"),
    ):
        with pytest.raises(BadRequest, match=why):
            read_table(None, paths)
