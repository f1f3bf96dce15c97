"""Migrations of the outbox tables."""
