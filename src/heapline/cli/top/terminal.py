"""Keys from a terminal, as names: "q", "up", "enter". While it is read, it neither echoes nor waits for a line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

SEQUENCES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1bOA": "up", "\x1bOB": "down",
    "\x1bOC": "right", "\x1bOD": "left", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home",
    "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end", "\x1b[1~": "home", "\x1b[4~": "end",
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x1b": "escape",
}  # fmt: skip
LONGEST = max(map(len, SEQUENCES))


def keys_in(text: str) -> Iterator[str]:
    """
    >>> list(keys_in("s\\x1b[Aq\\x1b")), list(keys_in("\\x1b[99;5u"))
    (['s', 'up', 'q', 'escape'], [])
    """
    at = 0
    while at < len(text):
        found = next((text[at : at + n] for n in range(LONGEST, 0, -1) if text[at : at + n] in SEQUENCES), None)
        if found == "\x1b" and text[at + 1 : at + 2] in ("[", "O"):  # a key that we do not know: pass it over whole
            end = at + 2
            while end < len(text) and not ("@" <= text[end] <= "~"):
                end += 1
            at = end + 1
        elif found is not None:
            yield SEQUENCES[found]
            at += len(found)
        else:
            yield text[at]
            at += 1


@contextlib.contextmanager
def reading_keys(pressed: Callable[[str], None]) -> Iterator[None]:
    """Calls `pressed` from the running loop for each key. Without a terminal to read from there are none."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(fd)

    def read() -> None:
        for key in keys_in(os.read(fd, 1024).decode("utf-8", "replace")):
            pressed(key)

    try:
        tty.setcbreak(fd)
        loop.add_reader(fd, read)
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
