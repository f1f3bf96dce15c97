"""The two tables of the outbox, as models.py first had them."""

from typing import Any, ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies: ClassVar[list[Any]] = []

    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="OutboxLane",
            fields=[
                ("name", models.CharField(max_length=32, primary_key=True, serialize=False)),
                ("owner", models.CharField(max_length=32, null=True)),
                ("epoch", models.BigIntegerField()),
                ("beat_ms", models.BigIntegerField()),
            ],
            options={
                "db_table": "heapline_outbox_lane",
            },
        ),
        migrations.CreateModel(
            name="OutboxMessage",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("topic", models.CharField(max_length=257)),
                ("payload", models.BinaryField()),
                ("priority", models.BigIntegerField()),
                ("message_key", models.CharField(max_length=1024, null=True)),
                ("deliver_at_ms", models.BigIntegerField(null=True)),
                ("headers", models.TextField(null=True)),
                ("ttl", models.FloatField(null=True)),
                ("max_retries", models.IntegerField(null=True)),
                ("fairness_key", models.CharField(max_length=1024, null=True)),
                ("created_ms", models.BigIntegerField()),
                ("lane", models.CharField(db_index=True, max_length=32, null=True)),
                ("epoch", models.BigIntegerField(null=True)),
                ("seq", models.BigIntegerField(null=True)),
                ("failed_ms", models.BigIntegerField(null=True)),
                ("error", models.CharField(max_length=500, null=True)),
            ],
            options={
                "db_table": "heapline_outbox",
                "ordering": ["id"],
            },
        ),
    ]
