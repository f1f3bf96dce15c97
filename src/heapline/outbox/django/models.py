"""The two tables of the outbox; column for column those of sql.py, so that either relay serves them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from heapline.outbox.store import ERROR_CHARACTERS, KEY_CHARACTERS, TOPIC_CHARACTERS


class OutboxMessage(models.Model):
    topic = models.CharField(max_length=TOPIC_CHARACTERS)
    payload = models.BinaryField()
    priority = models.BigIntegerField()
    message_key = models.CharField(max_length=KEY_CHARACTERS, null=True)
    deliver_at_ms = models.BigIntegerField(null=True)
    headers = models.TextField(null=True)  # JSON
    ttl = models.FloatField(null=True)
    max_retries = models.IntegerField(null=True)
    fairness_key = models.CharField(max_length=KEY_CHARACTERS, null=True)
    created_ms = models.BigIntegerField()
    # The relay's: who sends it, under which numbers; or why it cannot be sent.
    lane = models.CharField(max_length=32, null=True, db_index=True)
    epoch = models.BigIntegerField(null=True)
    seq = models.BigIntegerField(null=True)
    failed_ms = models.BigIntegerField(null=True)
    error = models.CharField(max_length=ERROR_CHARACTERS, null=True)

    class Meta:
        db_table = "heapline_outbox"
        ordering: ClassVar[list[str]] = ["id"]

    def __str__(self) -> str:
        return f"{self.topic} #{self.pk}"


class OutboxLane(models.Model):
    name = models.CharField(max_length=32, primary_key=True)
    owner = models.CharField(max_length=32, null=True)
    epoch = models.BigIntegerField()
    beat_ms = models.BigIntegerField()

    class Meta:
        db_table = "heapline_outbox_lane"

    def __str__(self) -> str:
        return str(self.name)
