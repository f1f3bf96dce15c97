"""The table of handlers of the log broker."""

from __future__ import annotations

from heapline.contract.handler_table import HandlerTable
from heapline.engine.topics import TopicKeeper

TABLE: HandlerTable[TopicKeeper] = HandlerTable()
HANDLERS, FEEDS = TABLE.commands, TABLE.feeds
handles, feeds = TABLE.handles, TABLE.yields
