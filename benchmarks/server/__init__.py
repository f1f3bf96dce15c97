"""`python -m benchmarks server`: a real `heapline serve` process and one client process, 256-byte messages.

Which figure is to be reached stands in targets.py; each other module measures one thing. Rates on a shared machine vary
with what else runs, so the CPU that both sides spend on a message is shown beside them.
"""
