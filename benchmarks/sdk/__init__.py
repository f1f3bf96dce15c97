"""`python -m benchmarks sdk`: what programs use (`heapline.connect`, tasks), on a real `heapline serve` process.

Which figure is to be reached stands in targets.py; each other module measures one thing.
"""
