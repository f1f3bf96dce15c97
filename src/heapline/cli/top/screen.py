"""What the person in front of `heapline top` has chosen to see, and what each key changes about it. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heapline.cli.top.model import SORTS, Sort

PAGE = 10  # lines


@dataclass(slots=True)
class Screen:
    server: str
    interval: float
    sort: Sort = "ready"
    reverse: bool = False
    only: str = ""  # part of the names to show
    is_typing: bool = False  # keys go into `only`
    topic: str | None = None  # shown in detail; None: the list of all
    chosen: str | None = None  # the topic under the cursor
    scroll: int = 0  # lines of the detail's partitions that are above the screen
    is_held: bool = False  # figures stand still
    lost: str = ""  # why the server cannot be asked
    lost_at: float = 0.0
    wants_end: bool = False

    def press(self, key: str, names: Sequence[str]) -> None:
        """`names` are the topics of the list as it is shown now."""
        if self.is_typing:
            self._type(key)
        elif key == "q":
            self.wants_end = True
        elif key in ("p", " "):
            self.is_held = not self.is_held
        elif self.topic is not None:
            self._in_detail(key)
        else:
            self._in_list(key, names)

    def _type(self, key: str) -> None:
        if key == "enter":
            self.is_typing = False
        elif key == "escape":
            self.is_typing, self.only = False, ""
        elif key == "backspace":
            self.only = self.only[:-1]
        elif len(key) == 1 and key.isprintable():
            self.only += key

    def _in_detail(self, key: str) -> None:
        if key in ("escape", "left", "backspace"):
            self.chosen, self.topic, self.scroll = self.topic, None, 0
        elif (step := _step(key)) is not None:
            self.scroll = max(0, self.scroll + step)

    def _in_list(self, key: str, names: Sequence[str]) -> None:
        if key in ("s", "S"):
            self.sort = SORTS[(SORTS.index(self.sort) + (1 if key == "s" else -1)) % len(SORTS)]
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "/":
            self.is_typing = True
        elif key == "escape":
            self.only, self.chosen = "", None
        elif key in ("enter", "right"):
            self.topic = self.chosen if self.chosen in names else next(iter(names), None)
        elif names and (step := _step(key)) is not None:
            at = names.index(self.chosen) if self.chosen in names else -1 if step > 0 else 0
            self.chosen = names[min(len(names) - 1, max(0, at + step))]


def _step(key: str) -> int | None:
    return {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -PAGE, "page down": PAGE,
            "home": -1_000_000, "end": 1_000_000}.get(key)  # fmt: skip
