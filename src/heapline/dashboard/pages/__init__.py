"""The pages. Importing this package registers them and their actions."""

from __future__ import annotations

from heapline.dashboard.pages import overview, topics

__all__ = ["SECTIONS", "overview", "topics"]

#: The rail: section, path, icon, label, and whether only an administrator of all topics sees it.
SECTIONS = (
    ("overview", "/", "layout-dashboard", "Overview", False),
    ("topics", "/topics", "layers", "Topics", False),
)
