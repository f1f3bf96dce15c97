"""The audit: proves or refutes from events that the queue kept its promises.

job.py runs it on Spark. The other modules are numpy over columns of events, which Spark's tasks call.
"""
