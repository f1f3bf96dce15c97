"""Which format a file is of, by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from heapline.errors import BadRequest
from heapline.spark.jobs.tables import kind_of, read_table


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.parquet", "parquet"), ("a.JSONL", "json"), ("a.csv.gz", "csv"), ("a.txt", "text"), ("s3://b/c.orc", "orc")],
)
def test_format_is_told_by_the_ending(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_folder_is_what_its_files_are_and_a_delta_table_is_one(tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    (tmp_path / "day=1" / "part.parquet").touch()
    (tmp_path / "_SUCCESS").touch()
    assert kind_of(str(tmp_path)) == "parquet"
    (tmp_path / "more.csv").touch()
    with pytest.raises(BadRequest, match="which of them is meant"):
        kind_of(str(tmp_path))
    (tmp_path / "_delta_log").mkdir()
    assert kind_of(str(tmp_path)) == "delta"


def test_what_is_not_there_or_cannot_be_told_is_refused_before_spark_is_asked(tmp_path: Path) -> None:
    for paths, why in (
        ([], "say what to read"),
        ([tmp_path / "no.parquet"], "there is no"),
        ([Path(__file__)], "does not tell what it is"),
    ):
        with pytest.raises(BadRequest, match=why):
            read_table(None, paths)
