"""The attributes of a call's spans, the same in the client, the server and the engine.

They are names and numbers: topic, partition and id of the first message, their count, the producer. Never a payload,
never a token. A command does not carry the topic's id suffix, so settlements show the first id in digits.
"""

from __future__ import annotations

from typing import Any

from heapline.contract.columns import Columns
from heapline.contract.ids import PARTITION_BITS, SEQUENCE_BITS, to_ulid


def request_attributes(command: Any) -> dict[str, Any]:
    """Return the topic, the count of messages, the producer and the first message id, as far as a command has them."""
    attributes: dict[str, Any] = {}
    if isinstance(topic := getattr(command, "topic", None), str):
        attributes["topic"] = topic
    if isinstance(producer := getattr(command, "producer_id", None), str):
        attributes["producer_id"] = producer
    if isinstance(columns := getattr(command, "messages", None), Columns):
        attributes["messages"] = len(columns)
    elif (leases := getattr(command, "leases", None)) is not None:
        attributes["messages"] = len(leases)
        attributes |= _first(leases.ids, None)
    return attributes


def result_attributes(result: Any) -> dict[str, Any]:
    """Return the count of messages, the first message id and its partition, as far as a result has them."""
    suffix = getattr(result, "id_suffix", None)
    if (ids := getattr(result, "ids", None)) is not None:
        return _first(ids, suffix)
    if isinstance(messages := getattr(result, "messages", None), Columns):
        return {"messages": len(messages)} | _first(messages.ids, suffix)  # type: ignore[attr-defined]
    if isinstance(id := getattr(result, "id", None), int):
        return {"messages": 1} | _of_id(id, suffix)
    return {}


def _first(ids: memoryview, suffix: int | None) -> dict[str, Any]:
    return _of_id(ids.cast("B").cast("q")[0], suffix) if ids.nbytes else {}


def _of_id(id: int, suffix: int | None) -> dict[str, Any]:
    """Return the ULID of an id, or its digits if the topic's id suffix is not known, and its partition."""
    if id <= 0:  # a row with an error
        return {}
    partition = id >> SEQUENCE_BITS & ((1 << PARTITION_BITS) - 1)
    return {"message_id": str(id) if suffix is None else to_ulid(id, suffix), "partition": partition}
