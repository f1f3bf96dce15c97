"""`python -m benchmarks server`: a real `heapline serve` process and one client process, 256-byte messages.

The targets are in targets.py; each other module measures one thing. Rates on a shared machine vary
with other work, so the CPU time that both sides spend per message is shown beside them.
"""
