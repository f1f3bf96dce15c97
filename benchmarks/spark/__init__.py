"""`python -m benchmarks spark`: the speed of the Spark integration with two cores.

Each module measures one direction.
"""
