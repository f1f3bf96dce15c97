"""`python -m benchmarks streams`: topics as streams: publishing, groups, ten million timers, seeking."""
