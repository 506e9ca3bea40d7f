#!/usr/bin/env python3
"""A load test: the coordinator rank of the demo.

It waits until every server has announced itself in {run_dir}/endpoints, then loads them with one
keep-alive connection per worker thread, one level of concurrency after the other, and writes what it
measured to {run_dir}/results/results.json. The exit code is 0 if every request succeeded, else 1.

    load.py --dir RUN_DIR --servers N [--concurrency 1,4,16] [--requests 100] [--tokens 32] [--wait 30]

`--requests` is per connection; every request goes to the next server in turn. Latencies are milliseconds,
from before the request is sent until the answer is read whole; percentiles are nearest-rank.
Standard library, Python >= 3.9.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from server import write_json

REQUEST_SECONDS = 10.0
PAUSE_AFTER_FAILURE = 0.05


class Client(threading.Thread):
    """One user: a connection to each server, one request at a time."""

    def __init__(self, number: int, endpoints: list[dict[str, Any]], requests: int, body: bytes) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.first, self.requests, self.body = number, requests, body
        self.connections = [
            http.client.HTTPConnection(endpoint["host"], endpoint["port"], timeout=REQUEST_SECONDS)
            for endpoint in endpoints
        ]
        self.latencies: list[float] = []
        self.failures: list[str] = []

    def run(self) -> None:
        for number in range(self.requests):
            connection = self.connections[(self.first + number) % len(self.connections)]
            begin = time.perf_counter()
            try:
                self.request(connection)
            except (OSError, ValueError, http.client.HTTPException) as error:
                connection.close()
                self.failures.append(f"{connection.host}:{connection.port}: {type(error).__name__}: {error}")
                time.sleep(PAUSE_AFTER_FAILURE)
            else:
                self.latencies.append((time.perf_counter() - begin) * 1000)
        for connection in self.connections:
            connection.close()

    def request(self, connection: http.client.HTTPConnection) -> None:
        connection.request("POST", "/v1/completions", self.body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            answer = json.loads(response.read())
        if response.status != 200:
            raise ValueError(f"status {response.status}: {answer}")
        if not answer["choices"][0]["text"]:
            raise ValueError("an empty completion")


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that is not exceeded by `share` of the sorted values (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def level(concurrency: int, endpoints: list[dict[str, Any]], requests: int, body: bytes) -> dict[str, Any]:
    """Load the servers at one concurrency; what was measured, as it goes into the result."""
    clients = [Client(number, endpoints, requests, body) for number in range(concurrency)]
    begin = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seconds = time.perf_counter() - begin
    latencies = sorted(latency for client in clients for latency in client.latencies)
    failures = [failure for client in clients for failure in client.failures]
    measured: dict[str, Any] = {
        "concurrency": concurrency,
        "completed": len(latencies),
        "failed": len(failures),
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(latencies) / seconds, 1),
    }
    if latencies:
        shares = {f"p{share}": percentile(latencies, share / 100) for share in (50, 90, 99)}
        values = {"mean": sum(latencies) / len(latencies), **shares, "max": latencies[-1]}
        measured["latency_ms"] = {name: round(value, 3) for name, value in values.items()}
    if failures:
        measured["failures"] = failures[:5]
    return measured


def find_endpoints(directory: Path, servers: int, seconds: float) -> list[dict[str, Any]]:
    """The servers of this run, once all have announced themselves. Raises TimeoutError."""
    run_id = os.environ.get("ALLOCD_RUN_ID", "")
    deadline = time.monotonic() + seconds
    while True:
        found = [json.loads(path.read_bytes()) for path in sorted(directory.glob("rank-*.json"))]
        found = [endpoint for endpoint in found if endpoint["run_id"] == run_id]
        if len(found) >= servers:
            return found
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{len(found)} of {servers} servers announced themselves within {seconds:g} s")
        time.sleep(0.05)


def whole_numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a load test of completion servers")
    parser.add_argument("--dir", type=Path, required=True, help="the run directory")
    parser.add_argument("--servers", type=int, required=True, help="how many servers to wait for")
    parser.add_argument("--concurrency", type=whole_numbers, default=[1, 4, 16], metavar="N,N,...")
    parser.add_argument("--requests", type=int, default=100, help="requests per connection at each level")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate per request")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds to wait for the servers")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    try:
        endpoints = find_endpoints(args.dir / "endpoints", args.servers, args.wait)
    except TimeoutError as error:
        print(f"load: {error}", file=sys.stderr)
        return 1
    body = json.dumps({"prompt": "Say it in a few words", "max_tokens": args.tokens}).encode()
    begin = time.perf_counter()
    levels = []
    for concurrency in args.concurrency:
        measured = level(concurrency, endpoints, args.requests, body)
        levels.append(measured)
        latency = measured.get("latency_ms", {})
        print(
            f"concurrency {concurrency:3}: {measured['requests_per_second']:8.1f} requests/s,"
            f" p50 {latency.get('p50', math.nan):.1f} ms, p99 {latency.get('p99', math.nan):.1f} ms,"
            f" {measured['failed']} failed",
            flush=True,
        )
    requests = {name: sum(measured[name] for measured in levels) for name in ("completed", "failed")}
    document = {
        "schema_version": 1,
        "run_id": os.environ.get("ALLOCD_RUN_ID", ""),
        "endpoints": [f"{endpoint['host']}:{endpoint['port']}" for endpoint in endpoints],
        "tokens_per_request": args.tokens,
        "seconds": round(time.perf_counter() - begin, 3),
        "requests": requests,
        "levels": levels,
    }
    write_json(args.dir / "results" / "results.json", document)
    return 0 if requests["completed"] and not requests["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
