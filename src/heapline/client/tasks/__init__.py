"""Tasks: functions that are enqueued by one process and run by workers. Start with `App`."""

from heapline.client.tasks.app import App
from heapline.client.tasks.outcomes import Bury, Retry
from heapline.client.tasks.task import Call, Sending, Task
from heapline.client.tasks.worker import Worker

__all__ = ["App", "Bury", "Call", "Retry", "Sending", "Task", "Worker"]
