"""The Django app that "heapline.outbox.django" in INSTALLED_APPS names."""

from heapline.client.outbox.django.apps import HeaplineOutbox

__all__ = ["HeaplineOutbox"]
