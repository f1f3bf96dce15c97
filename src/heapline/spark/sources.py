"""Which source a read's options name: a directory, or a server."""

from __future__ import annotations

from heapline.spark.directory import DirectorySource
from heapline.spark.log import Source
from heapline.spark.options import ReadOptions


def source_of(options: ReadOptions) -> Source:
    target = options.target
    if target.path is not None:
        return DirectorySource(target.path, options.lease_seconds)
    raise NotImplementedError
