"""Functions as work: enqueued here, run by workers elsewhere. `App` is where it begins."""

from heapline.client.tasks.app import App
from heapline.client.tasks.middleware import Call, Sending
from heapline.client.tasks.outcomes import Bury, Retry
from heapline.client.tasks.task import Task
from heapline.client.tasks.worker import Worker

__all__ = ["App", "Bury", "Call", "Retry", "Sending", "Task", "Worker"]
