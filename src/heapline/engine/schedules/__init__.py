"""Schedules in the engine: `store` keeps them, `firing` brings them into topics, `scheduler` does so in time."""
