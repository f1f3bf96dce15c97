"""The Postgres broker compared with other queues on PostgreSQL: the same server and messages, in alternating rounds.

Every driver works on its own tables in one server with fsync on. Payloads have 256 bytes, priorities are random.
"""
