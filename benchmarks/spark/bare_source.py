"""A minimal Python source of Arrow batches: Arrow files mapped into memory. A baseline for streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition


class BareSource(DataSource):  # type: ignore[misc]
    @classmethod
    def name(cls) -> str:
        return "bare_arrow"

    def schema(self) -> str:
        return "value binary not null"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return _Reader(self.options["path"])


class _Reader(DataSourceStreamReader):  # type: ignore[misc]
    def __init__(self, path: str) -> None:
        self._path = path

    def initialOffset(self) -> dict[str, int]:
        return {"files": 0}

    def latestOffset(self) -> dict[str, int]:
        return {"files": len(list(Path(self._path).glob("*.arrow")))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        files = sorted(str(file) for file in Path(self._path).glob("*.arrow"))
        return [InputPartition(file) for file in files[start["files"] : end["files"]]]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        with pa.memory_map(partition.value) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
