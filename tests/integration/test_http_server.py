"""The HTTP interface: shapes, routes and rejections. The contract itself is tested in tests/conformance."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.client.transports.http import HttpBroker
from tests.integration.http_rig import HttpRig
from tests.integration.server_rig import Keys

SEED = """POST /v1/heaps, DELETE /v1/heaps/{topic}, PATCH /v1/heaps/{topic}, GET /v1/heaps, GET /v1/stats,
POST /v1/enqueue, POST /v1/enqueue:batch, POST /v1/ack, POST /v1/nack, POST /v1/extend, GET /v1/peek"""
DESTRUCTIVE = {
    ("delete", "/v1/heaps/{topic}"), ("post", "/v1/heaps/{topic}:purge"), ("post", "/v1/dlq:delete"),
    ("delete", "/v1/heaps/{topic}:groups/{group}"), ("post", "/v1/heaps/{topic}:groups/{group}:delete-dead"),
    ("delete", "/v1/sinks/{name}"), ("post", "/v1/heaps/{topic}:groups/{group}:reset"),
    ("delete", "/v1/schedules/{name}"), ("delete", "/v1/keys/{key_id}"), ("delete", "/v1/users/{email}"),
}  # fmt: skip


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HttpRig]:
    async with HttpRig(tmp_path) as rig:
        await rig.heap()
        yield rig  # type: ignore[misc]


async def popped(rig: HttpRig, **more: Any) -> dict[str, Any]:
    answer = (await rig.post("pop", {"topic": "jobs", **more})).json()
    return answer["messages"][0]  # type: ignore[no-any-return]


# -- OpenAPI -----------------------------------------------------------------------------------------------------------


async def test_routes_of_the_seed_exist(rig: HttpRig) -> None:
    paths = (await rig.http.get("/openapi.json")).json()["paths"]
    for route in SEED.replace("\n", " ").split(", "):
        method, path = route.split()
        assert method.lower() in paths[path], route


async def test_every_call_documents_its_answer_its_refusals_and_its_body(rig: HttpRig) -> None:
    document = (await rig.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        if not path.startswith("/v1/"):
            continue
        for method, operation in operations.items():
            responses = operation["responses"]
            assert {"400", "401", "403", "404", "409", "413", "429", "503"} <= responses.keys(), path
            assert ("428" in responses) == ((method, path) in DESTRUCTIVE)
            assert "422" not in responses
            for code, response in responses.items():
                (content,) = response["content"].values()
                name = content["schema"]["$ref"].rpartition("/")[2]
                assert (name == "ErrorResponse") == (code >= "400"), (path, code)
                assert name in schemas
            assert operation["summary"]
            body = operation.get("requestBody")
            assert (
                body is None
                or "$ref" in (found := body["content"]["application/json"]["schema"])
                or (found["additionalProperties"] is False)
            )


async def test_numbers_in_openapi_have_64_bits(rig: HttpRig) -> None:
    def look(schema: Any) -> None:
        if isinstance(schema, dict):
            if schema.get("type") == "integer":
                assert -(1 << 63) <= schema["minimum"] <= schema["maximum"] < 1 << 63, schema
            for inner in schema.values():
                look(inner)
        elif isinstance(schema, list):
            for inner in schema:
                look(inner)

    look((await rig.http.get("/openapi.json")).json())


async def test_docs_page_loads_nothing_from_elsewhere(rig: HttpRig) -> None:
    answer = await rig.http.get("/docs")
    assert "/v1/enqueue:batch" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|<script|src=", answer.text)


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"payload": base64.b64encode(b"\x00\xff").decode()}, b"\x00\xff"),
        ({"payload_text": "žluť\0"}, "žluť\0".encode()),
        ({"payload_text": ""}, b""),
        ({"payload_json": {"a": [1, 2.5, None]}}, b'{"a":[1,2.5,null]}'),
        ({"payload_json": None}, b"null"),
    ],
)
async def test_payload_may_be_base64_text_or_json(rig: HttpRig, given: dict[str, Any], stored: bytes) -> None:
    assert (await rig.post("enqueue", {"topic": "jobs", **given})).status_code == 200
    assert base64.b64decode((await popped(rig))["payload"]) == stored


@pytest.mark.parametrize("given", [{}, {"payload": "", "payload_text": ""}, {"payload_text": "", "payload_json": 1}])
async def test_exactly_one_payload_is_required(rig: HttpRig, given: dict[str, Any]) -> None:
    for path, body in (("enqueue", given), ("enqueue:batch", {"messages": [given]})):
        answer = await rig.post(path, {"topic": "jobs", **body})
        assert answer.status_code == 400
        assert "exactly one" in answer.json()["text"]
    assert (await rig.behind.stats("jobs")).ready == 0


async def test_payload_encoding_falls_back_to_base64(rig: HttpRig) -> None:
    await rig.post("enqueue:batch", {"topic": "jobs", "messages": [
        {"payload_json": {"n": 1}}, {"payload_text": "word"}, {"payload": "/w=="}]})  # fmt: skip
    shown = (await rig.get("peek", topic="jobs", payload_as="json")).json()["items"]
    assert [m.get("payload_json") for m in shown] == [{"n": 1}, None, None]
    assert [m.get("payload") for m in shown] == [None, base64.b64encode(b"word").decode(), "/w=="]
    shown = (await rig.post("pop", {"topic": "jobs", "max_messages": 3, "payload_as": "text"})).json()["messages"]
    assert [m.get("payload_text") for m in shown] == ['{"n":1}', "word", None]


async def test_ids_and_tokens_are_strings_and_times_are_rfc_3339_in_utc(rig: HttpRig) -> None:
    enqueued = (await rig.post("enqueue", {"topic": "jobs", "payload_text": "x"})).json()
    message = await popped(rig)
    assert (message["message_id"], message["id"]) == (enqueued["message_id"], enqueued["id"])
    assert len(message["message_id"]) == 26
    assert message["id"].isdigit()
    assert isinstance(message["lease_token"], str)
    assert message["deadline"].endswith("Z")
    by_digits = await rig.get("get", topic="jobs", message_id=message["id"])
    assert by_digits.json()["message_id"] == message["message_id"]


async def test_lost_leases_are_returned_as_digit_strings(rig: HttpRig) -> None:
    await rig.post("enqueue", {"topic": "jobs", "payload_text": "x"})
    message = await popped(rig)
    lease = {"message_id": message["message_id"], "lease_token": "999"}
    refused = await rig.post("nack", {"topic": "jobs", **lease})
    assert (refused.status_code, refused.json()["error"]) == (409, "LeaseLost")
    assert refused.json()["facts"]["lost"] == [message["id"]]
    reported = await rig.post("nack", {"topic": "jobs", "leases": [lease], "tell_lost": True})
    assert reported.json() == {"lost": [message["id"]]}


async def test_log_is_returned_as_lines_of_json(rig: HttpRig) -> None:
    for text in ("a", "b"):
        await rig.post("enqueue", {"topic": "jobs", "payload_text": text})
    answer = await rig.get("log", topic="jobs")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    events = [e for line in answer.text.splitlines() for e in json.loads(line)["events"]]
    assert [base64.b64decode(p) for e in events if e["kind"] == "enqueued" for p in e["payloads"]] == [b"a", b"b"]
    assert (await rig.get("log", topic="jobs", partition=7)).status_code == 400


async def test_stats_of_all_heaps_are_a_page(rig: HttpRig) -> None:
    await rig.heap("other")
    first = (await rig.get("stats", limit=1)).json()
    assert [h["topic"] for h in first["items"]] == ["jobs"]
    last = (await rig.get("stats", cursor=first["cursor"])).json()
    assert ([h["topic"] for h in last["items"]], "cursor" in last) == (["other"], False)
    assert (await rig.get("heaps/other:stats")).json()["topic"] == "other"
    assert (await rig.get("stats", tpic="other")).status_code == 400


# -- paths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["billing/jobs", "billing%2Fjobs", "billing%2fjobs"])
async def test_namespaced_heap_is_a_path_and_its_slash_may_be_escaped(rig: HttpRig, path: str) -> None:
    await rig.heap("billing/jobs")
    assert (await rig.http.get(f"/v1/heaps/{path}")).json()["name"] == "billing/jobs"
    assert (await rig.post(f"heaps/{path}:pause")).status_code == 200
    assert (await rig.behind.stats("billing/jobs")).paused
    assert not (await rig.behind.stats("jobs")).paused
    assert (await rig.http.patch(f"/v1/heaps/{path}", json={"k": 5})).json()["config"]["k"] == 5


@pytest.mark.parametrize("path", ["heaps/jobs:pause/x", "heaps/a/b/c", "heaps/jobs:", "heaps/%00", "heaps/:purge"])
async def test_malformed_topic_path_is_rejected(rig: HttpRig, path: str) -> None:
    assert (await rig.http.get(f"/v1/{path}")).status_code in (400, 404)
    assert (await rig.post(path)).status_code in (400, 404, 405)


async def test_misspelled_parameter_is_refused(rig: HttpRig) -> None:
    answer = await rig.get("peek", topic="jobs", limt=1)
    assert answer.status_code == 400
    assert answer.json()["text"].startswith("unknown field 'limt'")


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"topic": "jobs", "payload_text": "\xff"}', b'{"topic": NaN}',
        b'{"topic": "jobs", "payload_text": "\\ud800"}', b'{"topic": "jobs", "payload_json": "\xff"}',
        b'{"topic": "jobs", "payload_text": "x", "priority": 9223372036854775808}',
        b'{"topic": "jobs", "payload_text": "x", "delay": 1e999}', b'{"topic": "jo\\u0000bs", "payload_text": "x"}',
        b'{"topic": "jobs", "payload": "***"}', b'{"topic": "jobs", "payload_json": ' + b"[" * 100_000,
        b'{"topic": "jobs", "payload_text": "x", "key": "\\udfff"}', b'{"topic": 5, "payload_text": "x"}',
        b'{"topic": "jobs", "payload_text": "x", "deliver_at": "2030-01-01T00:00:00"}',
    ],
)  # fmt: skip
async def test_invalid_body_is_refused_and_changes_nothing(rig: HttpRig, body: bytes) -> None:
    before = await rig.behind.offsets("jobs")
    answer = await rig.http.post("/v1/enqueue", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"] in ("BadRequest", "BadName")
    assert await rig.behind.offsets("jobs") == before


@pytest.mark.parametrize("name", ["self", "topic", "config", "no such setting"])
async def test_unknown_heap_settings_are_refused(rig: HttpRig, name: str) -> None:
    answer = await rig.http.patch("/v1/heaps/jobs", json={name: 1})
    assert (answer.status_code, answer.json()["error"]) == (400, "BadRequest")


@pytest.mark.parametrize(
    "headers",
    [{"content-type": sort} for sort in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data", "x")]
    + [{"content-encoding": "gzip"}],
)
async def test_form_encoded_and_compressed_bodies_are_rejected(rig: HttpRig, headers: dict[str, str]) -> None:
    content = b'{"topic": "jobs", "payload_text": "x"}'
    answer = await rig.http.post("/v1/enqueue", content=content, headers=headers)
    assert answer.status_code == 415
    assert (await rig.behind.stats("jobs")).ready == 0


async def test_too_large_request_is_rejected_before_its_body_is_read(tmp_path: Path) -> None:
    async with HttpRig(tmp_path, request_bytes_max=1 << 20) as rig:
        answer = await rig.http.post("/v1/enqueue", json={"topic": "jobs", "payload_text": "x" * (2 << 20)})
        assert (answer.status_code, answer.headers["connection"]) == (413, "close")


# -- authentication ----------------------------------------------------------------------------------------------------


class Counting(Keys):
    asked = 0

    async def authenticate(self, credential: str | None) -> Any:
        self.asked += 1
        return await super().authenticate(credential)


async def test_caller_is_authenticated_once_per_call(tmp_path: Path) -> None:
    guard = Counting(boss="*:produce,consume,admin")
    async with HttpRig(tmp_path, guard) as rig:
        rig.http.headers["authorization"] = "boss"
        await rig.heap()
        await rig.post("enqueue", {"topic": "jobs", "payload_text": "x"})
        await rig.get("peek", topic="jobs")
        assert guard.asked == 3


async def test_body_of_an_unauthenticated_request_is_not_read(tmp_path: Path) -> None:
    async with HttpRig(tmp_path, Keys(boss="*:admin")) as rig:
        head = b"POST /v1/enqueue HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
        assert (await rig.raw(head + b"{")).startswith(b"HTTP/1.1 401 ")  # and the rest is never sent


async def test_unauthenticated_request_gets_401_whatever_else_is_wrong(tmp_path: Path) -> None:
    async with HttpRig(tmp_path, Keys(boss="*:admin")) as rig:
        for answer in (
            await rig.get("peek"), await rig.get("peek", topic="jobs", limit="x"), await rig.post("enqueue", {"a": 1}),
            await rig.get("heaps/%00"), await rig.post("heaps/none:purge"), await rig.get("log", topic="none"),
        ):  # fmt: skip
            assert (answer.status_code, answer.json()["error"]) == (401, "Unauthenticated")
            assert answer.headers["www-authenticate"] == "Bearer"


async def test_caller_out_of_scope_gets_403_and_nothing_else(tmp_path: Path) -> None:
    async with HttpRig(tmp_path, Keys(boss="*:produce,consume,admin", reader="other:consume")) as rig:
        rig.http.headers["authorization"] = "boss"
        await rig.heap()
        rig.http.headers["authorization"] = "reader"
        share = {"topic": "jobs", "messages": []}
        for answer in (
            await rig.post("enqueue", {"topic": "jobs", "payload_text": "x"}),
            await rig.post("pop", {"topic": "jobs"}), await rig.get("heaps/jobs"), await rig.get("heaps/none"),
            await rig.post("heaps/jobs:purge?force=true"), await rig.get("log", topic="jobs"),
            await rig.post("batches:prepare", {"batch_id": "b", "part": "p", "shares": [share]}),
        ):  # fmt: skip
            assert (answer.status_code, answer.json()["error"]) == (403, "PermissionDenied")
        assert (await rig.get("heaps")).json() == {"items": []}


# -- confirmation ------------------------------------------------------------------------------------------------------


async def test_purge_needs_a_confirmation_token(rig: HttpRig) -> None:
    await rig.post("enqueue", {"topic": "jobs", "payload_text": "x"})
    assert (await rig.post("heaps/jobs:purge")).status_code == 400
    first = await rig.post("heaps/jobs:purge", params={"force": True})
    assert (first.status_code, first.json()["error"]) == (428, "ConfirmationNeeded")
    token = first.json()["facts"]["token"]
    assert (await rig.post("heaps/jobs:purge", params={"confirmation": token})).status_code == 400
    assert (await rig.behind.stats("jobs")).ready == 1
    assert (await rig.post("heaps/jobs:purge", params={"force": True, "confirmation": token})).json() == {"count": 1}
    assert (await rig.post("heaps/jobs:purge", params={"force": True, "confirmation": token})).status_code == 428


async def test_confirmation_is_valid_for_one_call_on_one_heap(rig: HttpRig) -> None:
    await rig.heap("other")
    token = (await rig.post("heaps/other:purge", params={"force": True})).json()["facts"]["token"]
    sent = {"x-confirmation": token}
    assert (await rig.post("heaps/jobs:purge", params={"force": True}, headers=sent)).status_code == 428
    assert (await rig.http.delete("/v1/heaps/other", params={"force": True}, headers=sent)).status_code == 428
    assert (await rig.post("heaps/other:purge", params={"force": True}, headers=sent)).json() == {"count": 0}
    assert (await rig.post("heaps/none:purge", params={"force": True})).status_code == 404


async def test_confirmation_of_a_deletion_is_valid_for_the_same_letters(rig: HttpRig) -> None:
    await rig.post("enqueue", {"topic": "jobs", "payload_text": "x"})
    m = await popped(rig)
    await rig.post("bury", {"topic": "jobs", "message_id": m["message_id"], "lease_token": m["lease_token"]})
    one, force = {"topic": "jobs", "ids": [m["message_id"]]}, {"force": True}
    sent = {"x-confirmation": (await rig.post("dlq:delete", one, params=force)).json()["facts"]["token"]}
    assert (await rig.post("dlq:delete", {"topic": "jobs", "where": {}}, params=force, headers=sent)).status_code == 428
    assert (await rig.get("dlq:peek", topic="jobs", message_id=m["id"])).json()["state"] == "dead"
    assert (await rig.post("dlq:delete", one, params=force, headers=sent)).json() == {"count": 1}


async def test_error_text_advises_in_http_and_the_sdk_over_http_in_python(rig: HttpRig) -> None:
    response = await rig.http.get("/v1/heaps/nowhere")
    assert (response.status_code, response.json()["text"]) == (
        404,
        "topic 'nowhere' does not exist; create it with POST /v1/heaps",
    )
    async with HttpBroker(rig.url) as hl:
        with pytest.raises(heapline.TopicNotFound, match=r"create it with create_topic\('nowhere'\)"):
            await hl.get_topic("nowhere")
