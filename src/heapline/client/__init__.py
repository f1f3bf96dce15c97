"""Brokers that are elsewhere: what `heapline.connect` makes, and the thin clients that it stands on.

gRPC's own handlers for forks crash the children of a process that has used it: one in six, with as many threads as
`connect_sync` has. Without them a child is well as long as it leaves its parent's connections alone, and `forking`
sees to that. gRPC reads this when it is loaded, so it stands here, before anything loads it.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
