"""The app's name for Django."""

from __future__ import annotations

from django.apps import AppConfig


class HeaplineOutbox(AppConfig):
    name = "heapline.outbox.django"
    label = "heapline_outbox"
    verbose_name = "Heapline outbox"
    default_auto_field = "django.db.models.BigAutoField"
