"""`heapline bench`: how fast this server, or this disk, is. The loads, what they are measured by, and the result."""

from heapline.cli.bench.command import bench

__all__ = ["bench"]
