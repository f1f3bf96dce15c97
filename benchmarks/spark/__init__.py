"""`python -m benchmarks spark`: the log as data, on a Spark of two cores. Each module measures one direction."""
