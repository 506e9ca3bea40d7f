#!/usr/bin/env python3
"""A small completion server: a worker rank of the demo.

It listens on a free port, announces itself in {run_dir}/endpoints/rank-N.json, and answers
`POST /v1/completions` after a latency that grows with the number of tokens; a limited number of requests
is served at once, the others queue, so that a load test has something to see. SIGTERM ends it normally:
requests in flight are finished, statistics are written, the exit code is 0.

    server.py --dir RUN_DIR --rank N [--base-ms 8] [--token-ms 0.2] [--slots 8] [--die-after REQUESTS]

`--die-after` makes it a bad worker: it exits 3 in the middle of its work. Standard library, Python >= 3.9.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DRAIN_SECONDS = 5.0
MAX_BODY = 1 << 20  # bytes
MAX_TOKENS = 4096


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file that is whole for whoever sees it: a temporary name, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:  # whatever it is, nothing half-written stays
        os.unlink(temporary)
        raise


class Service:
    """What all connections share: slots to work in, and counters."""

    def __init__(self, base: float, token: float, slots: int, die_after: int | None) -> None:
        """`base` and `token` are seconds a request and a token take."""
        self.base, self.token, self.die_after = base, token, die_after
        self.slots = threading.BoundedSemaphore(slots)
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self.requests = self.tokens = self.in_flight = self.most_in_flight = 0

    def complete(self, prompt: str, tokens: int) -> str:
        """Generate a text of so many words, in the time that a model might take."""
        with self.lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            with self.slots:
                time.sleep(self.base + tokens * self.token)
            return " ".join([prompt.split(" ")[-1] or "word"] * tokens)
        finally:
            with self.lock:
                self.in_flight -= 1
                self.requests += 1
                self.tokens += tokens
                self.idle.notify_all()
                if self.die_after is not None and self.requests >= self.die_after:
                    print(f"fatal: device lost after {self.requests} requests", file=sys.stderr, flush=True)
                    os._exit(3)

    def drain(self) -> bool:
        """Wait for requests in flight; False if some were still running at the end of the patience."""
        with self.lock:
            return self.idle.wait_for(lambda: self.in_flight == 0, DRAIN_SECONDS)


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 with keep-alive; one thread a connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer's headers and body leave in one packet
    timeout = 60
    service: Service

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, {"status": "ok"})
        else:
            self.answer(404, {"error": f"no such path: {self.path}"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True  # the body was not read
            self.answer(413 if length.isdecimal() else 411, {"error": f"expected a body of 0..{MAX_BODY} bytes"})
            return
        body = self.rfile.read(int(length))
        if self.path != "/v1/completions":
            self.answer(404, {"error": f"no such path: {self.path}"})
            return
        try:
            request = json.loads(body)
            prompt, tokens = request["prompt"], request.get("max_tokens", 16)
            if not isinstance(prompt, str) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_TOKENS:
                raise ValueError(f"expected a prompt (text) and max_tokens (1..{MAX_TOKENS})")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.answer(400, {"error": str(error)})
            return
        text = self.service.complete(prompt, tokens)
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": tokens}
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        self.answer(200, {"object": "text_completion", "choices": [choice], "usage": usage})

    def answer(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A line a request would be the loudest thing in the logs."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of ours; anything else is."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def listen(node: str) -> tuple[Server, str]:
    """Listen on a free port where other nodes can reach this one; the server, and the host to announce.

    A node's name goes out as it is, for it may mean a loopback address here and the right one elsewhere.
    """
    try:
        ipaddress.ip_address(node)
        return Server((node, 0), Handler), node
    except ValueError:
        pass
    try:
        socket.getaddrinfo(node, None)
        return Server(("", 0), Handler), node
    except OSError:
        print(f"the name {node!r} is not known here: serving this machine only", file=sys.stderr)
        return Server(("127.0.0.1", 0), Handler), "127.0.0.1"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a small completion server")
    parser.add_argument("--dir", type=Path, required=True, help="the run directory")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--base-ms", type=float, default=8.0, help="milliseconds a request takes")
    parser.add_argument("--token-ms", type=float, default=0.2, help="milliseconds that each token adds")
    parser.add_argument("--slots", type=int, default=8, help="requests served at once")
    parser.add_argument("--die-after", type=int, metavar="N", help="exit 3 after N requests")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    service = Service(args.base_ms / 1000, args.token_ms / 1000, args.slots, args.die_after)
    Handler.service = service
    server, host = listen(os.environ.get("ALLOCD_NODE", "127.0.0.1"))
    port = server.socket.getsockname()[1]
    started = time.monotonic()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    endpoint = {"host": host, "port": port, "rank": args.rank, "pid": os.getpid()}
    write_json(
        args.dir / "endpoints" / f"rank-{args.rank}.json",
        {**endpoint, "run_id": os.environ.get("ALLOCD_RUN_ID", "")},
    )
    print(f"rank {args.rank} serves on {host}:{port}", flush=True)

    stop.wait()
    server.shutdown()
    drained = service.drain()
    server.server_close()
    thread.join()
    seconds = time.monotonic() - started
    statistics = {
        "requests": service.requests,
        "tokens": service.tokens,
        "most_in_flight": service.most_in_flight,
        "drained": drained,
        "seconds": round(seconds, 3),
    }
    write_json(args.dir / "stats" / f"rank-{args.rank}.json", {"rank": args.rank, **statistics})
    print(f"rank {args.rank} stops after {service.requests} requests in {seconds:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
