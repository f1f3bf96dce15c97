"""The Postgres broker next to other queues on PostgreSQL: the same server, the same messages, in turns.

Every driver works on its own tables in one server with fsync on. Payloads have 256 bytes, priorities are random.
"""
