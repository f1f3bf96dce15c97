"""Read keys from a terminal, and change what `heapline top` shows. Draws nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from heapline.cli.top.sampler import SORTS, Sort

PAGE = 10  # lines
SEQUENCES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1bOA": "up", "\x1bOB": "down",
    "\x1bOC": "right", "\x1bOD": "left", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home",
    "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end", "\x1b[1~": "home", "\x1b[4~": "end",
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x1b": "escape",
}  # fmt: skip
LONGEST = max(map(len, SEQUENCES))
STEPS = {
    "up": -1, "k": -1, "down": 1, "j": 1, "page up": -PAGE, "page down": PAGE, "home": -1_000_000, "end": 1_000_000,
}  # fmt: skip


@dataclass(slots=True)
class Screen:
    """The state of the view, and of the connection."""

    server: str
    interval: float  # seconds
    sort: Sort = "ready"
    reverse: bool = False
    only: str = ""  # filter on names
    is_typing: bool = False  # keys go into `only`
    topic: str | None = None  # shown in detail; None for the list of all topics
    chosen: str | None = None  # the topic under the cursor
    scroll: int = 0  # partitions above the screen
    is_held: bool = False  # no new samples
    lost: str = ""  # why the server cannot be reached
    lost_at: float = 0.0
    wants_end: bool = False

    def press(self, key: str, names: Sequence[str]) -> None:
        """Handle a key. `names` are the topics in the list that is shown now."""
        if self.is_typing:
            self._type(key)
        elif key == "q":
            self.wants_end = True
        elif key in ("p", " "):
            self.is_held = not self.is_held
        elif self.topic is not None:
            self._press_in_detail(key)
        else:
            self._press_in_list(key, names)

    def _type(self, key: str) -> None:
        if key == "enter":
            self.is_typing = False
        elif key == "escape":
            self.is_typing, self.only = False, ""
        elif key == "backspace":
            self.only = self.only[:-1]
        elif len(key) == 1 and key.isprintable():
            self.only += key

    def _press_in_detail(self, key: str) -> None:
        if key in ("escape", "left", "backspace"):
            self.chosen, self.topic, self.scroll = self.topic, None, 0
        elif (step := STEPS.get(key)) is not None:
            self.scroll = max(0, self.scroll + step)

    def _press_in_list(self, key: str, names: Sequence[str]) -> None:
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
        elif names and (step := STEPS.get(key)) is not None:
            at = names.index(self.chosen) if self.chosen in names else -1 if step > 0 else 0
            self.chosen = names[min(len(names) - 1, max(0, at + step))]


def keys_in(text: str) -> Iterator[str]:
    """Yield the names of the keys in a terminal's input.

    >>> list(keys_in("s\\x1b[Aq\\x1b")), list(keys_in("\\x1b[99;5u"))
    (['s', 'up', 'q', 'escape'], [])
    """
    at = 0
    while at < len(text):
        match = next((text[at : at + n] for n in range(LONGEST, 0, -1) if text[at : at + n] in SEQUENCES), None)
        if match == "\x1b" and text[at + 1 : at + 2] in ("[", "O"):  # an unknown key: skip its whole sequence
            end = at + 2
            while end < len(text) and not ("@" <= text[end] <= "~"):
                end += 1
            at = end + 1
        elif match is not None:
            yield SEQUENCES[match]
            at += len(match)
        else:
            yield text[at]
            at += 1


@contextlib.contextmanager
def reading_keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` from the running loop for each key, without echo. Does nothing if stdin is not a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(fd)

    def read() -> None:
        for key in keys_in(os.read(fd, 1024).decode("utf-8", "replace")):
            press(key)

    try:
        tty.setcbreak(fd)
        loop.add_reader(fd, read)
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
