"""Prepared batches: parts that become visible together."""
