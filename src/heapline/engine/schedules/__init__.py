"""Schedules in the engine: `store` and `snapshots` keep them, `firings` enqueues them, `scheduler` runs them."""
