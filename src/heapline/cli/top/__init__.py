"""`heapline top`: a server, live in the terminal. What it knows, what is chosen, how it looks: one file each."""

from heapline.cli.top.command import top

__all__ = ["top"]
