"""The outbox: a message is enqueued if and only if the database transaction that wrote it commits, and then once.

    from heapline import outbox

This is only the name that programs use; heapline.client.outbox says how it works. SQLAlchemy and Django are imported
when they are used, not before.
"""

from heapline.client.outbox import OutboxRelay, create_tables, enqueue, enqueue_call, metadata

__all__ = ["OutboxRelay", "create_tables", "enqueue", "enqueue_call", "metadata"]
