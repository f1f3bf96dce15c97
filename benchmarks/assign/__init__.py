"""`python -m benchmarks assign`: strategies next to a plain hash ring and to round robin."""
