"""Recognize repeated enqueues, by producer sequence or by idempotency key."""
