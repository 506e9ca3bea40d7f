"""The operations, over a real socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from supervisor.service.interface import STATES, Refusal
from supervisor.service.requests import BODY
from tests.service.client import Answer, ask, connected
from tests.service.world import World, served

PLAN = {"plan": 'name = "bench"', "cwd": "/work"}


def problem(answer: Answer) -> tuple[int, str, str]:
    """The status, kind and detail of a problem document that is as it must be."""
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json
    assert document["status"] == answer.status
    assert document["type"] == f"urn:allocd:problem:{document['kind']}"
    assert document["title"]
    return answer.status, document["kind"], document["detail"]


async def test_a_plan_is_submitted_shown_and_stopped(tmp_path: Path) -> None:
    async with served(World(), tmp_path) as (_, path), connected(path) as line:
        made = await line.ask("POST", "/v1/allocations", PLAN)
        assert made.status == 201
        assert made.headers["location"] == "/v1/allocations/a1"
        shown = await line.ask("GET", made.headers["location"])
        assert shown.json == made.json
        assert (shown.json["schema_version"], shown.json["state"], shown.json["ranks"]) == (1, "pending", [])
        stopped = await line.ask("POST", "/v1/allocations/1001/stop", {"how": "cancel"})
        assert (stopped.status, stopped.json["stopping"]) == (202, "cancel")


async def test_the_same_key_means_the_same_allocation(tmp_path: Path) -> None:
    async with served(World(), tmp_path) as (_, path):
        first = await ask(path, "POST", "/v1/allocations", PLAN, Idempotency_Key="once")
        again = await ask(path, "POST", "/v1/allocations", PLAN, Idempotency_Key="once")
        other = await ask(path, "POST", "/v1/allocations", {**PLAN, "cwd": "/"}, Idempotency_Key="once")
        assert first.json == again.json
        assert problem(other)[:2] == (409, "conflict")
        assert (await ask(path, "GET", "/v1/allocations")).json["total"] == 1


async def test_adopt_and_follow(tmp_path: Path) -> None:
    async with served(World(), tmp_path) as (_, path):
        adopted = await ask(path, "POST", "/v1/adoptions", {**PLAN, "jobid": "77_3"})
        followed = await ask(path, "POST", "/v1/follows", {"jobid": "78"})
        assert [(item.status, item.json["kind"], item.json["jobid"]) for item in (adopted, followed)] == [
            (201, "adopted", "77_3"),
            (201, "followed", "78"),
        ]


async def test_pages_lead_through_all_that_fit(tmp_path: Path) -> None:
    world = World()
    for number in range(25):
        world.put(name="even" if number % 2 == 0 else "odd")
    async with served(world, tmp_path) as (_, path), connected(path) as line:
        target: str | None = "/v1/allocations?name=even&limit=5"
        sizes, keys = [], []
        while target:
            answer = await line.ask("GET", target)
            sizes.append(len(answer.json["allocations"]))
            keys += [item["key"] for item in answer.json["allocations"]]
            assert answer.json["total"] == 13
            link = answer.headers.get("link")
            assert (link is None) == (answer.json["next"] is None)
            target = link and link.removeprefix("<").removesuffix('>; rel="next"')
        assert sizes == [5, 5, 3]
        assert keys == [f"a{number}" for number in range(1, 26, 2)]


async def test_a_page_goes_on_after_one_that_no_longer_fits(tmp_path: Path) -> None:
    world = World()
    for _ in range(4):
        world.put()
    async with served(world, tmp_path) as (_, path):
        first = await ask(path, "GET", "/v1/allocations?state=running&limit=2")
        world.change("a2", state="ended")
        second = await ask(path, "GET", f"/v1/allocations?state=running&limit=2&after={first.json['next']}")
        assert [item["key"] for item in second.json["allocations"]] == ["a3", "a4"]
        assert (await ask(path, "GET", "/v1/allocations?state=ended&state=queued")).json["total"] == 1
        assert problem(await ask(path, "GET", "/v1/allocations?after=nobody"))[:2] == (404, "not_found")


async def test_a_list_has_no_ranks_and_one_has(tmp_path: Path) -> None:
    world = World()
    world.put(ranks=[{"rank": 0, "phase": "running"}])
    async with served(world, tmp_path) as (_, path):
        assert "ranks" not in (await ask(path, "GET", "/v1/allocations")).json["allocations"][0]
        assert (await ask(path, "GET", "/v1/allocations/a1")).json["ranks"] == [{"rank": 0, "phase": "running"}]


@pytest.mark.parametrize(
    ("method", "target", "body", "kind"),
    [
        ("GET", "/v1/nothing", None, (404, "not_found")),
        ("GET", "/v1/allocations/", None, (404, "not_found")),
        ("GET", "/v1/allocations/nobody", None, (404, "not_found")),
        ("GET", "/v1/allocations/%2e%2e%2fetc", None, (404, "not_found")),
        ("GET", "/v1/allocations/a%00b", None, (404, "not_found")),
        ("GET", "/v1/allocations/a1/receipt", None, (404, "not_found")),
        ("DELETE", "/v1/allocations/a1", None, (405, "method")),
        ("GET", "/v1/allocations?limit=0", None, (422, "invalid")),
        ("GET", "/v1/allocations?limit=1001", None, (422, "invalid")),
        ("GET", "/v1/allocations?limit=1e2", None, (422, "invalid")),
        ("GET", "/v1/allocations?limit=%D9%A1", None, (422, "invalid")),
        ("GET", "/v1/allocations?limit=1&limit=2", None, (422, "invalid")),
        ("GET", "/v1/allocations?stat=running", None, (422, "invalid")),
        ("GET", "/v1/health?x=1", None, (422, "invalid")),
        ("GET", "/v1/events?after=-1", None, (422, "invalid")),
        ("GET", "/v1/allocations/a1/logs?follow=yes", None, (422, "invalid")),
        ("POST", "/v1/allocations", b"{", (400, "malformed")),
        ("POST", "/v1/allocations", b"\xff", (400, "malformed")),
        ("POST", "/v1/allocations", b'{"plan":"x","plan":"y","cwd":"/"}', (400, "malformed")),
        ("POST", "/v1/allocations", b'{"plan":NaN}', (400, "malformed")),
        ("POST", "/v1/allocations", b"[" * 100_000, (400, "malformed")),
        ("POST", "/v1/allocations", b"1" * 5000, (400, "malformed")),
        ("POST", "/v1/allocations", b"[]", (422, "invalid")),
        ("POST", "/v1/allocations", {"plan": "x"}, (422, "invalid")),
        ("POST", "/v1/allocations", {**PLAN, "extra": 1}, (422, "invalid")),
        ("POST", "/v1/allocations", {**PLAN, "cwd": "relative"}, (422, "invalid")),
        ("POST", "/v1/allocations", {**PLAN, "cwd": "/a\nb"}, (422, "invalid")),
        ("POST", "/v1/allocations", {**PLAN, "plan": "\ud800"}, (422, "invalid")),
        ("POST", "/v1/allocations", {**PLAN, "options": ["-a", 1]}, (422, "invalid")),
        ("POST", "/v1/allocations", {**PLAN, "environ": {"A=B": "c"}}, (422, "invalid")),
        ("POST", "/v1/allocations", {**PLAN, "environ": {"A": "\0"}}, (422, "invalid")),
        ("POST", "/v1/allocations", {**PLAN, "plan": "unfit"}, (422, "unfit")),
        ("POST", "/v1/follows", {"jobid": "0"}, (422, "invalid")),
        ("POST", "/v1/follows", {"jobid": 12}, (422, "invalid")),
        ("POST", "/v1/allocations/a1/stop", {"how": "kill"}, (422, "invalid")),
    ],
)
async def test_what_is_wrong_is_said(
    tmp_path: Path, method: str, target: str, body: Any, kind: tuple[int, str]
) -> None:
    world = World()
    world.put()
    world.upset["unfit"] = Refusal(422, "unfit", "plan:1: found unfit; expected a plan", errors=[])
    async with served(world, tmp_path) as (_, path), connected(path) as line:
        answer = await line.ask(method, target, body)
        assert problem(answer)[:2] == kind
        assert len(world.allocations()) == 1
        assert (await ask(path, "GET", "/v1/health")).status == 200


async def test_the_host_header_is_believed_in_nothing(tmp_path: Path) -> None:
    async with served(World(), tmp_path) as (_, path):
        for host in ("[", "a:b:c", "evil/..", ""):
            answer = await ask(path, "GET", "/v1/a%20b", Host=host)
            assert problem(answer)[:2] == (404, "not_found")
            assert answer.json["instance"] == "/v1/a%20b"


async def test_all_errors_of_a_body_are_told_with_their_places(tmp_path: Path) -> None:
    async with served(World(), tmp_path) as (_, path):
        answer = await ask(path, "POST", "/v1/allocations", {"plan": 1, "cwd": "x", "option": []})
        assert [item["at"] for item in answer.json["errors"]] == ["option", "plan", "cwd"]
        assert "did you mean options?" in answer.json["errors"][0]["expected"]


async def test_a_method_that_is_not_known_here_is_told_the_others(tmp_path: Path) -> None:
    async with served(World(), tmp_path) as (_, path):
        answer = await ask(path, "PUT", "/v1/allocations")
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, POST")
        head = await ask(path, "HEAD", "/v1/allocations")
        assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize(
    "media", ["text/plain", "application/json; charset=latin-1", "application/x-www-form-urlencoded"]
)
async def test_another_media_type_is_refused(tmp_path: Path, media: str) -> None:
    async with served(World(), tmp_path) as (_, path):
        assert problem(await ask(path, "POST", "/v1/allocations", PLAN, Content_Type=media))[:2] == (415, "media")
        right = await ask(path, "POST", "/v1/allocations", PLAN, Content_Type='application/JSON; charset="UTF-8"')
        assert right.status == 201


async def test_a_body_has_a_limit_whether_or_not_its_length_is_told(tmp_path: Path) -> None:
    async with served(World(), tmp_path) as (_, path):
        fits = await ask(path, "POST", "/v1/allocations", {**PLAN, "plan": "x" * (BODY - 100)})
        assert fits.status == 201
        async with connected(path) as line:
            line.writer.write(b"POST /v1/allocations HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
            line.writer.write(b"Content-Length: 99999999999999999999\r\n\r\n")
            assert problem(await line.answer())[:2] == (413, "too_large")
            assert await line.closed() == b""
        async with connected(path) as line:
            line.writer.write(b"POST /v1/allocations HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
            line.writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
            line.writer.write((b"10000\r\n" + b" " * 65536 + b"\r\n") * 17)
            assert problem(await line.answer())[:2] == (413, "too_large")


async def test_a_fault_is_told_to_the_house_and_not_to_the_client(tmp_path: Path) -> None:
    faults: list[str] = []
    world = World()
    world.upset["break"] = RuntimeError("a secret of the house")
    async with served(world, tmp_path, faults) as (_, path):
        answer = await ask(path, "POST", "/v1/allocations", {**PLAN, "plan": "break"})
        assert problem(answer)[:2] == (500, "fault")
        assert b"secret" not in answer.body
    assert [fault.splitlines()[-1] for fault in faults] == ["RuntimeError: a secret of the house"]


async def test_the_receipt_is_what_is_on_the_disk(tmp_path: Path) -> None:
    world = World()
    made = world.put(run_dir=str(tmp_path))
    run_receipt, sealed = tmp_path / "receipt.run.json", tmp_path / "receipt.json"
    async with served(world, tmp_path) as (_, path), connected(path) as line:
        run_receipt.write_bytes(b'{ "kind":  "run" }\n')
        assert (await line.ask("GET", "/v1/allocations/a1/receipt")).body == b'{ "kind":  "run" }\n'
        sealed.write_bytes(b'{"kind":"sealed"}')
        world.change(made.key, receipt=str(sealed))
        assert (await line.ask("GET", "/v1/allocations/a1/receipt")).json == {"kind": "sealed"}
        sealed.write_bytes(b'{"kind":')
        assert problem(await line.ask("GET", "/v1/allocations/a1/receipt"))[:2] == (507, "storage")
        sealed.unlink()
        sealed.symlink_to(run_receipt)
        assert problem(await line.ask("GET", "/v1/allocations/a1/receipt"))[:2] == (507, "storage")


async def test_metrics_count_routes_and_never_paths(tmp_path: Path) -> None:
    world = World()
    world.put()
    world.meter.verdict("success", "completed")
    world.meter.detected(0.3)
    async with served(world, tmp_path) as (_, path), connected(path) as line:
        for target in ("/v1/allocations/a1", "/v1/allocations/1001", "/v1/allocations/nobody", "/wp-login.php"):
            await line.ask("GET", target)
        await line.ask("FETCH", "/v1/health")
        answer = await line.ask("GET", "/metrics")
        lines = answer.body.decode().splitlines()
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert 'allocd_allocations{state="running"} 1.0' in lines
        assert 'allocd_verdicts_total{outcome="success",reason="completed"} 1.0' in lines
        assert 'allocd_failure_detection_seconds_bucket{le="0.5"} 1.0' in lines
        route = "/v1/allocations/{name}"
        assert f'allocd_requests_total{{method="GET",route="{route}",status="200"}} 2.0' in lines
        assert f'allocd_requests_total{{method="GET",route="{route}",status="404"}} 1.0' in lines
        assert 'allocd_requests_total{method="GET",route="other",status="404"} 1.0' in lines
        assert 'allocd_requests_total{method="other",route="/v1/health",status="405"} 1.0' in lines
        assert not [line for line in lines if "1001" in line or "php" in line or "_created" in line]
        assert sum(line.startswith("allocd_allocations{") for line in lines) == len(STATES)


async def test_the_document_says_what_there_is(tmp_path: Path) -> None:
    async with served(World(), tmp_path) as (_, path):
        document = (await ask(path, "GET", "/openapi.json")).json
        assert document["openapi"] == "3.1.0"
        assert {"get", "post"} == set(document["paths"]["/v1/allocations"])
        body = document["paths"]["/v1/allocations"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["required"] == ["plan", "cwd"]
        assert body["additionalProperties"] is False
        assert json.dumps(document)


@pytest.mark.slow
async def test_ten_thousand_requests(tmp_path: Path) -> None:
    """Twenty connections, each asking one after another; nothing is left of them."""
    world = World()
    for _ in range(20):
        world.put()

    async def many(path: str) -> int:
        async with connected(path) as line:
            return sum([(await line.ask("GET", "/v1/allocations/a7")).status == 200 for _ in range(500)])

    async with served(world, tmp_path) as (server, path):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(many(path)) for _ in range(20)]
        assert sum(task.result() for task in tasks) == 10_000
        await ask(path, "GET", "/v1/health")
        assert server.connections <= 1
