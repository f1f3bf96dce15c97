"""`python -m benchmarks assign`: strategies next to a plain ring and round robin, and crowds that lose a worker."""
