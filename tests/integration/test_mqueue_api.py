"""MQueue's API over real HTTP: the original's shapes, the order of service, time, and refusals."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from heapline.contract.message import Outgoing
from heapline.server.auth.secret import Secret
from tests.integration.mqueue_rig import ALICE, BOB, NAMESPACE, PLACE, TOPIC, WHERE, MQueueRig, b64, item
from tests.unit.server.auth.rig import PASSWORD

SMALL = {"segment_bytes": 1 << 20, "max_payload_bytes": 64 << 10}


async def test_client_written_for_the_original_works(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        token = (await rig.directory_guard.login(ALICE, Secret(PASSWORD))).reveal()
        url, headers = str(rig.http.base_url), {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as http:
            body = (
                '[{"namespace": "payments", "topic": "process-refund", "priority": 1, "payload": "cmVmdW5kIDE=",'
                ' "deliver_after": "2023-10-27T10:00:00Z"},'
                ' {"namespace": "payments", "topic": "process-refund", "priority": 0, "payload": "cmVmdW5kIDI="}]'
            )
            enqueued = await http.post("/enqueue", content=body)
            assert enqueued.status_code == 200
            first, second = json.loads(enqueued.text)
            assert type(first) is int
            assert type(second) is int
            assert first != second

            dequeued = await http.get("/dequeue?namespace=payments&topic=process-refund&limit=10")
            assert dequeued.status_code == 200
            got = json.loads(dequeued.text)
            assert [m["id"] for m in got] == [second, first]
            assert [base64.b64decode(m["payload"]) for m in got] == [b"refund 2", b"refund 1"]
            assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", m["lease_expires_at"]) for m in got)

            ack = await http.post(
                "/ack", content=f'{{"id": {second}, "namespace": "payments", "topic": "process-refund"}}'
            )
            assert ack.status_code == 200
            nack = await http.post(
                "/nack", content=f'{{"id": {first}, "namespace": "payments", "topic": "process-refund", '
                '"error": "Payment gateway timeout"}',
            )  # fmt: skip
            assert nack.status_code == 200
            assert (await http.get("/dequeue", params=PLACE)).json() == []  # it waits for its backoff
            await rig.pass_time(3600)
            headers["Authorization"] = f"Bearer {(await rig.directory_guard.login(ALICE, Secret(PASSWORD))).reveal()}"
            again = (await http.get("/dequeue", params=PLACE, headers=headers)).json()
            assert [m["id"] for m in again] == [first]
            assert (await rig.behind.get(WHERE, first)).reason == "Payment gateway timeout"
            done = await http.post("/ack", json={"id": first, **PLACE}, headers=headers)
            assert done.status_code == 200
        assert await rig.counts() == (0, 0, 0, 0)


async def test_dequeue_returns_exactly_these_fields(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        (id,) = await alice.put(b"\x00\xff", priority=7)
        answer = await alice.dequeue()
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        (found,) = answer.json()
        token = found.pop("lease_token")
        assert isinstance(token, str)
        assert found == {
            "id": id, "payload": "AP8=", "lease_expires_at": "2026-01-01T00:00:30Z", "attempts": 1, "priority": 7
        }  # fmt: skip


async def test_lowest_priority_value_is_served_first_and_ids_keep_item_order(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        priorities = [5, -3, 9, 0, -(1 << 63), (1 << 63) - 1]
        ids = (await alice.enqueue(*(item(str(p).encode(), p) for p in priorities))).json()
        found = await alice.take()
        assert [m["priority"] for m in found] == sorted(priorities)
        assert {m["id"]: base64.b64decode(m["payload"]) for m in found} == {
            id: str(p).encode() for id, p in zip(ids, priorities, strict=True)
        }


async def test_limit_is_ten_unless_given(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        await alice.put(*[b"x"] * 25)
        assert [len((await alice.dequeue()).json()), len((await alice.dequeue(limit=3)).json())] == [10, 3]
        assert len((await alice.dequeue(limit=10_000)).json()) == 12
        for limit in (0, -1, 10_001, "many", 1.5):
            assert (await alice.dequeue(limit=limit)).status_code == 400


async def test_deliver_after_is_a_wall_clock_time(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        later = rig.now() + timedelta(minutes=5)
        zoned = later.isoformat().replace("+00:00", "Z")
        elsewhere = (later + timedelta(hours=2)).isoformat().replace("+00:00", "+02:00")
        ids = (await alice.enqueue(item(deliver_after=zoned), item(deliver_after=elsewhere))).json()
        await rig.pass_time(299)
        assert await alice.take() == []
        await rig.pass_time(1.5)
        assert sorted(m["id"] for m in await alice.take()) == sorted(ids)


async def test_ten_thousand_items_in_one_request_are_served_in_order(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        ids = (await alice.enqueue(*(item(b"%d" % i, i % 7) for i in range(10_000)))).json()
        assert len(set(ids)) == 10_000
        found = await alice.take(10_000)
        expected = sorted(range(10_000), key=lambda i: (i % 7, ids[i]))
        assert [m["id"] for m in found] == [ids[i] for i in expected]
        assert [base64.b64decode(m["payload"]) for m in found] == [b"%d" % i for i in expected]


BAD_BODIES: list[tuple[str, Any]] = [
    ("enqueue", b""),
    ("enqueue", b"["),
    ("enqueue", b"\xff\xfe"),
    ("enqueue", b"[" * 100_000),
    ("enqueue", {}),
    ("enqueue", []),
    ("enqueue", [1]),
    ("enqueue", [{**PLACE, "priority": 1}]),
    ("enqueue", [{"topic": TOPIC, "payload": ""}]),
    ("enqueue", [item(), {**item(), "payload": "no base64!"}]),
    ("enqueue", [item(), {**item(), "payload": "QQ"}]),
    ("enqueue", [item(), {**item(), "payload": None}]),
    ("enqueue", [item(priority=1 << 63)]),
    ("enqueue", [{**item(), "priority": 1.5}]),
    ("enqueue", [{**item(), "priority": True}]),
    ("enqueue", [{**item(), "priority": "1"}]),
    ("enqueue", [item(deliver_after="tomorrow")]),
    ("enqueue", [item(deliver_after="2026-02-30T00:00:00Z")]),
    ("enqueue", [item(deliver_after="2026-01-01T00:00:00")]),
    ("enqueue", [item(deliver_after=1_700_000_000)]),
    ("enqueue", [item(deliver_after="0001-01-01T00:00:00Z")]),
    ("enqueue", [item(deliver_after="9999-12-31T23:59:59-10:00")]),
    ("enqueue", [item(idempotency_key="")]),
    ("enqueue", [item(), item(deliver_afer="2026-01-01T00:00:00Z")]),
    ("enqueue", [{**item(), "topic": "a/b"}]),
    ("enqueue", [{**item(), "topic": ".."}]),
    ("enqueue", [{**item(), "topic": ""}]),
    ("enqueue", [{**item(), "topic": "x" * 129}]),
    ("enqueue", [{**item(), "namespace": "payments/x"}]),
    ("enqueue", [{**item(), "namespace": "_system", "topic": "batches"}]),
    ("ack", {**PLACE}),
    ("ack", {**PLACE, "id": -1}),
    ("ack", {**PLACE, "id": 1 << 63}),
    ("ack", {**PLACE, "id": str(1 << 63)}),
    ("ack", {**PLACE, "id": 1.5}),
    ("ack", {**PLACE, "id": None}),
    ("ack", {**PLACE, "id": "0x10"}),
    ("ack", {**PLACE, "id": 1, "lease_token": 5}),
    ("ack", {**PLACE, "id": 1, "lease_token": "abc"}),
    ("ack", {**PLACE, "id": 1, "error": "no field of an ack"}),
    ("ack", {"id": 1, "namespace": NAMESPACE}),
    ("ack", [1]),
    ("nack", {**PLACE, "id": 1, "error": 3}),
    ("nack", b'{"id": 1, "namespace": "payments", "topic": "process-refund", "error": "\\ud800"}'),
]


async def test_invalid_request_gets_400_and_changes_nothing(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        bob = await rig.login(BOB)
        (held, waiting) = await bob.put(b"held", b"waiting")
        assert [m["id"] for m in await bob.take(1)] == [held]
        before, topics = await rig.counts(), await rig.behind.list_topics()
        for call, body in BAD_BODIES:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await rig.http.post(f"/{call}", content=content, headers=bob.headers)
            assert answer.status_code == 400, (call, body, answer.text)
            reported = answer.json()
            assert set(reported) == {"error", "facts", "text"}
            assert reported["error"] in ("BadRequest", "BadName"), reported
        for params in ({"topic": TOPIC}, {"namespace": NAMESPACE}, {"namespace": "..", "topic": "x"}):
            answer = await rig.http.get("/dequeue", params=params, headers=bob.headers)
            assert answer.status_code == 400, answer.text
        assert (await rig.counts(), await rig.behind.list_topics()) == (before, topics)
        assert [m["id"] for m in await bob.take()] == [waiting]


async def test_error_for_an_invalid_payload_does_not_contain_it(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        answer = await alice.enqueue({**item(), "payload": "my secret payload!"})
        assert answer.status_code == 400
        assert "$[0].payload" in answer.text
        assert "secret" not in answer.text


async def test_one_too_large_message_rejects_the_whole_request(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        await rig.behind.create_topic(WHERE, **SMALL)
        answer = await alice.enqueue(item(b"small"), item(b"x" * (65 << 10)))
        assert (answer.status_code, answer.json()["error"]) == (413, "PayloadTooLarge")
        answer = await alice.enqueue(item(b"small"), {**item(b"x" * (65 << 10)), "topic": "another"})
        assert answer.status_code == 200, answer.text  # the other topic accepts more, and is created
        assert await rig.counts() == (1, 0, 0, 0)


async def test_request_over_the_server_s_limit_is_413(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path, request_bytes_max=1 << 20) as rig:
        alice = await rig.login(ALICE)
        answer = await alice.enqueue(*(item(b"x" * 1000) for _ in range(1000)))
        assert answer.status_code == 413
        assert set(answer.json()) == {"error", "facts", "text"}
        assert await alice.take() == []


async def test_ids_may_be_sent_as_text(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        one, other = await alice.put(b"1", b"2")
        await alice.take()
        assert (await alice.ack(str(one))).status_code == 200
        assert (await alice.nack(str(other))).status_code == 200
        assert await rig.counts() == (0, 1, 0, 0)


async def test_nack_records_its_error_and_cuts_a_long_one(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        ids = await alice.put(b"1", b"2", b"3")
        await alice.take()
        for id, more in zip(ids, ({"error": "x" * 10_000}, {"error": ""}, {}), strict=True):
            assert (await alice.nack(id, **more)).status_code == 200
        assert (await rig.behind.get(WHERE, ids[0])).reason == "x" * 4096


async def test_message_nacked_too_often_is_a_dead_letter(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        await rig.behind.create_topic(WHERE, max_retries_default=1, **SMALL)
        (id,) = [e.id for e in await rig.behind.enqueue_batch(WHERE, [Outgoing(b"x")])]
        for attempt in (1, 2):
            alice = await rig.login(ALICE)
            (found,) = await alice.take()
            assert (found["id"], found["attempts"]) == (id, attempt)
            assert (await alice.nack(id, error="no")).status_code == 200
            await rig.pass_time(3600)
        assert await rig.counts() == (0, 0, 0, 1)


# -- rights ------------------------------------------------------------------------------------------------------------


async def test_users_and_keys_are_accepted_and_others_rejected(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        _, key = rig.directory_guard.keys.create("worker", ["payments/process-refund:produce,consume"])
        worker = rig.anybody(key.reveal())
        (id,) = await worker.put(b"x")
        assert [m["id"] for m in await worker.take()] == [id]
        for stranger in (rig.anybody(), rig.anybody("nonsense"), rig.anybody("hl_0000_wrong")):
            for call in (stranger.enqueue(item()), stranger.dequeue(), stranger.ack(id), stranger.nack(id)):
                answer = await call
                assert (answer.status_code, answer.json()["error"]) == (401, "Unauthenticated")
        assert await rig.counts() == (0, 0, 1, 0)


async def test_expired_token_is_401(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        await alice.put(b"x")
        await rig.pass_time(24 * 3600)
        assert (await alice.enqueue(item())).status_code == 401
        assert (await alice.dequeue()).status_code == 401
        assert await rig.counts() == (1, 0, 0, 0)
        assert len(await (await rig.login(ALICE)).take()) == 1


async def test_out_of_scope_is_403_even_if_the_request_is_invalid(tmp_path: Path) -> None:
    users = {ALICE: "payments/*:produce", BOB: "payments/*:consume"}
    async with MQueueRig(tmp_path, users) as rig:
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        (id,) = await alice.put(b"x")
        assert [m["id"] for m in await bob.take()] == [id]
        foreign = {**item(), "namespace": "salaries"}
        for refused in (
            alice.dequeue(), alice.ack(id), alice.nack(id), bob.enqueue(item()),
            alice.enqueue(foreign), alice.enqueue(item(), foreign), bob.dequeue(namespace="salaries"),
        ):  # fmt: skip
            answer = await refused
            assert (answer.status_code, answer.json()["error"]) == (403, "PermissionDenied")
        assert await rig.counts() == (0, 0, 1, 0)
        assert [info.name for info in await rig.behind.list_topics()] == [WHERE]


# -- implicitly created topics -----------------------------------------------------------------------------------------


async def test_enqueue_creates_the_topics_it_names(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        bob = await rig.login(BOB)
        there = {**item(b"1"), "namespace": "default", "topic": "plain"}
        answer = await bob.enqueue(item(b"0"), there, item(b"2", 0))
        assert answer.status_code == 200, answer.text
        assert [info.name for info in await rig.behind.list_topics()] == [WHERE, "plain"]
        assert [m["id"] for m in await bob.take()] == [answer.json()[2], answer.json()[0]]
        (plain,) = (await bob.dequeue(namespace="default", topic="plain")).json()
        assert plain["id"] == answer.json()[1]


async def test_dequeue_from_a_missing_topic_returns_nothing_and_creates_nothing(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        bob = await rig.login(BOB)
        answer = await bob.dequeue(namespace="nobody", topic="knows")
        assert (answer.status_code, answer.json()) == (200, [])
        assert (await bob.ack(1)).status_code == 409
        assert await rig.behind.list_topics() == []


async def test_unknown_topic_gets_404_if_implicit_creation_is_off(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path, mqueue_creates_topics=False) as rig:
        bob = await rig.login(BOB)
        await rig.behind.create_topic("payments/known", **SMALL)
        for answer in (
            await bob.enqueue(item()), await bob.enqueue({**item(), "topic": "known"}, item()), await bob.dequeue()
        ):  # fmt: skip
            assert (answer.status_code, answer.json()["error"]) == (404, "TopicNotFound")
        assert await rig.counts("payments/known") == (0, 0, 0, 0)
        assert (await bob.enqueue({**item(), "topic": "known"})).status_code == 200


async def test_implicit_topics_of_a_namespace_are_limited_even_concurrently(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path, mqueue_topics_per_namespace_max=2, mqueue_topics_max=3) as rig:
        bob = await rig.login(BOB)
        two = [{**item(), "topic": "a"}, {**item(), "topic": "b"}, {**item(), "topic": "c"}]
        assert (await bob.enqueue(*two)).status_code == 429  # none of the three
        assert await rig.behind.list_topics() == []
        answers = await asyncio.gather(*(bob.enqueue({**item(), "topic": f"t{i}"}) for i in range(6)))
        assert sorted(a.status_code for a in answers) == [200, 200, 429, 429, 429, 429]
        assert (await bob.enqueue({**item(), "namespace": "other"})).status_code == 200
        refused = await bob.enqueue({**item(), "namespace": "third"})
        assert (refused.status_code, refused.json()["error"]) == (429, "ResourceExhausted")
        made = [info.name for info in await rig.behind.list_topics()]
        assert len(made) == 3
        for name in made:  # existing ones continue
            namespace, topic = name.split("/")
            assert (await bob.enqueue({**item(), "namespace": namespace, "topic": topic})).status_code == 200


async def test_rejected_request_creates_no_topic(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        bob = await rig.login(BOB)
        answer = await bob.enqueue(item(), {**item(b"x" * (2 << 20)), "topic": "another"})
        assert answer.status_code == 413
        assert (await bob.enqueue(*[item(b"x" * (1 << 20))] * 16)).status_code == 400  # over the limit of one write
        assert await rig.behind.list_topics() == []


# -- over several topics -----------------------------------------------------------------------------------------------


async def test_enqueue_over_several_topics_is_atomic(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        bob = await rig.login(BOB)
        await rig.behind.create_topic("payments/a", **SMALL)
        await rig.behind.create_topic("payments/b", **SMALL)
        a, b = {**item(), "topic": "a"}, {**item(), "topic": "b"}
        key = {"idempotency_key": "k"}
        assert (await bob.enqueue({**b, **key})).status_code == 200
        other = {**b, **key, "payload": b64(b"other")}
        refused = await bob.enqueue(a, other)
        assert (refused.status_code, refused.json()["error"]) == (409, "IdempotencyConflict")
        assert await rig.counts("payments/a") == (0, 0, 0, 0)
        assert await rig.behind.list_batches() == []
        ids = (await bob.enqueue(a, b, a)).json()
        assert [m["id"] for m in (await bob.dequeue(topic="a")).json()] == [ids[0], ids[2]]
        assert (await bob.dequeue(topic="b")).json()[1]["id"] == ids[1]


async def test_decisions_over_several_topics_are_forgotten_once_applied(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        bob = await rig.login(BOB)
        for _ in range(3):
            assert (await bob.enqueue({**item(), "topic": "a"}, {**item(), "topic": "b"})).status_code == 200
        assert len(await rig.behind.list_batches()) == 3
        await rig.behind.topics.batches.forget_old(7 * 86400)  # as its periodic check does every minute
        assert await rig.behind.list_batches() == []
        await rig.restart()
        assert await rig.behind.list_batches() == []
        assert (await rig.counts("payments/a"))[0] == 3


async def test_idempotency_key_makes_a_repeated_enqueue_the_same_message(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        bob = await rig.login(BOB)
        one = [item(b"1", idempotency_key="k1")]
        two = [item(b"2", idempotency_key="k2"), {**item(b"3", idempotency_key="k3"), "topic": "another"}]
        for body in (one, two):
            assert (await bob.enqueue(*body)).json() == (await bob.enqueue(*body)).json()
        assert await rig.counts() == (2, 0, 0, 0)
        assert len({id for _ in range(2) for id in (await bob.enqueue(item(b"4"))).json()}) == 2  # without one: twice


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_concurrent_workers_get_each_message_once(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        put = await asyncio.gather(*(alice.put(*(b"%d" % i for i in range(20))) for _ in range(10)))
        done: list[int] = []

        async def work(worker: Any) -> None:
            while found := await worker.take(7):
                for m in found:
                    assert (await worker.ack(m["id"])).status_code == 200
                    done.append(m["id"])

        await asyncio.gather(*(work(worker) for worker in (alice, bob) * 4))
        assert sorted(done) == sorted(id for ids in put for id in ids)
        assert await rig.counts() == (0, 0, 0, 0)


async def test_openapi_describes_all_four_calls(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        reported = (await rig.http.get("/openapi.json")).json()
        assert {"/enqueue", "/dequeue", "/ack", "/nack"} <= set(reported["paths"])
        body = reported["paths"]["/enqueue"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(body["items"]["required"]) == {"namespace", "topic", "payload"}
        assert "$defs" not in json.dumps(reported)


@pytest.mark.parametrize("path", ["/enqueue", "/ack", "/nack"])
async def test_only_the_methods_of_mqueue_exist(tmp_path: Path, path: str) -> None:
    async with MQueueRig(tmp_path) as rig:
        assert (await rig.http.get(path)).status_code == 405
        assert (await rig.http.post("/dequeue")).status_code == 405
