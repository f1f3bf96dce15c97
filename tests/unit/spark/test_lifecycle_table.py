"""The table of lifecycles: concurrent runs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from heapline.spark.jobs.lifecycle_updates import LifecycleTable, TableMoved
from heapline.spark.lake.claims import Extent


def test_second_of_two_first_lifecycle_runs_is_rejected(tmp_path: Path) -> None:
    columns = {"topic": "string", "id": "bigint", "is_over": "boolean"}
    runs = [LifecycleTable(str(tmp_path), columns) for _ in range(2)]  # both find no table
    folders = [run.new_folder() for run in runs]
    for folder in folders:
        (tmp_path / folder / "is_over=true").mkdir(parents=True)
        parquet.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / folder / "is_over=true" / "part.parquet")
    assert runs[0].commit("jobs", folders[0], Extent(1, {0: 9})) == 3
    with pytest.raises(TableMoved):
        runs[1].commit("jobs", folders[1], Extent(1, {0: 9}))
    (over,) = LifecycleTable(str(tmp_path), columns).files("jobs").values()
    assert len(over) == 1
