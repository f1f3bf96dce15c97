"""The one client process of a lifecycle benchmark, ours and each peer's: `python -m benchmarks.drivers.NAME`.

A driver runs in the interpreter that has its client library, so this package needs nothing but the standard library;
what to do comes as JSON on standard input, what came of it goes as JSON to standard output (window.py).
"""
