"""Work shared over a changing crowd of workers: stable ids, one leader, partitions that stay where they are.

It knows nothing of queues: the engine may use it, it uses nothing of the engine.
"""
