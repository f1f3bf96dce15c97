"""The Postgres broker: stateless nodes over one or more PostgreSQL databases, the shards.

The broker is imported when one is opened, because it needs asyncpg and redis (`pip install heapline[sql]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heapline.sql.broker import SqlBroker

__all__ = ["open"]


def open(postgres: Sequence[str], **config: Any) -> SqlBroker:
    """Return a broker on PostgreSQL databases, for `async with`. Keywords are fields of SqlConfig.

    The order of the URLs is part of the data: each database stores its index and how many there are.
    """
    try:
        import asyncpg  # noqa: F401
        import redis  # noqa: F401
    except ImportError as error:
        text = "heapline.sql.open needs asyncpg and redis; install `heapline[sql]`"
        raise ImportError(text, name=error.name) from None
    from heapline.sql.broker import SqlBroker
    from heapline.sql.config import make_sql_config

    return SqlBroker(make_sql_config(postgres, config))
