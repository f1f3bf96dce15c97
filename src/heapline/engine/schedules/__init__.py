"""Schedules in the engine: `store` and `kept` keep them, `firing` brings them into topics, `scheduler` in time."""
