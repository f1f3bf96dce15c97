"""Clients of a server: `heapline.connect`, its transports and wrappers, and tasks."""
