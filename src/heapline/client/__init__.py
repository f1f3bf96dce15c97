"""Clients of a server: `heapline.connect`, its transports and wrappers, tasks and the outbox.

gRPC's own fork handlers crash one in six children of a process that has used gRPC with as many threads as
`connect_sync` has. Without them a child works as long as it does not touch its parent's connections, and sdk.py
sees to that. gRPC reads this setting when it is loaded, so it is set here, before anything loads gRPC.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
