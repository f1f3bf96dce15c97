"""The table of handlers of the Postgres broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heapline.contract.handler_table import HandlerTable

if TYPE_CHECKING:
    from heapline.sql.node import Node

TABLE: HandlerTable[Node] = HandlerTable()
HANDLERS, FEEDS = TABLE.commands, TABLE.feeds
handles, feeds = TABLE.handles, TABLE.yields
