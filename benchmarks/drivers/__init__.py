"""The one client process of a lifecycle benchmark, for Heapline and each peer: `python -m benchmarks.drivers.NAME`.

A driver runs in the interpreter that has its client library, so this package uses only the standard library;
the job is JSON on standard input, the results are JSON on standard output (window.py).
"""
