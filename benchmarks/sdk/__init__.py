"""`python -m benchmarks sdk`: the public API (`heapline.connect`, tasks) on a real `heapline serve` process.

The targets are in targets.py; each other module measures one thing.
"""
