"""The fixed row in front of every message's record, as a numpy dtype: 80 bytes, little endian.

Version 1. To change it after a release, add a dtype beside this one, chosen by the version in the unit;
never edit this one. The row's own checksum and the payload's make a record readable on its own, without its unit.
"""

from __future__ import annotations

import numpy as np

ROW = np.dtype(
    [
        ("crc", "<u4"),  # crc32c of the row from byte 4 on, then of the small part
        ("payload_crc", "<u4"),
        ("payload_at", "<u4"),  # distance in bytes from the row's start to its payload
        ("payload_len", "<u4"),
        ("small_at", "<u4"),  # distance to the small part: key, fairness key, then headers as msgpack
        ("small_len", "<u4"),
        ("key_len", "<u2"),
        ("flags", "<u2"),
        ("max_retries", "<u2"),
        ("fairness_len", "<u2"),  # bytes of the fairness key
        ("id", "<i8"),
        ("priority", "<i8"),
        ("enqueued_at", "<i8"),  # ms
        ("due", "<i8"),  # ms; 0 = immediately
        ("ttl_ms", "<i8"),  # 0 = none
        ("turn", "<i8"),  # among the messages of its priority; 0 on topics where keys do not take turns
    ]
)
assert ROW.itemsize == 80

FLAG_KEY = 1
FLAG_HEADERS = 2
FLAG_WALL = 4  # due is wall time
FLAG_FAIRNESS = 8
DEFAULT_RETRIES = 0xFFFF  # the topic's max_retries_default
