"""Where Django looks for the app that "heapline.outbox.django" means."""

from heapline.client.outbox.django.apps import HeaplineOutbox

__all__ = ["HeaplineOutbox"]
