"""`python -m benchmarks assign`: strategies compared with a plain ring and round robin, and failover after a crash."""
