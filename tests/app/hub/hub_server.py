"""A stand-in for the Hugging Face hub on a loopback port: metadata by HEAD, files by GET with ranges, and faults."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40


@dataclass
class FakeHub:
    files: dict[str, bytes]
    """By 'owner/repo/file'."""
    break_after_bytes: int | None = None
    """Each answer ends this early, without a word."""
    ignores_ranges: bool = False
    status: int | None = None
    """Answer everything with this status."""
    error_code: str = ""
    needs_token: str | None = None
    stalls: bool = False
    """Metadata comes, the file's bytes never do, until the hub closes."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range header)."""
    closing: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                hub._answer(self, with_body=False)

            def do_GET(self) -> None:
                hub._answer(self, with_body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def ranges(self) -> list[str | None]:
        """Range headers of the downloads, in order."""
        return [span for method, path, span in self.requests if method == "GET" and "/resolve/" in path]

    def _answer(self, handler: BaseHTTPRequestHandler, with_body: bool) -> None:
        self.requests.append((handler.command, handler.path, handler.headers.get("Range")))
        if self.needs_token and handler.headers.get("Authorization") != f"Bearer {self.needs_token}":
            return self._send(handler, 401, b"", {"X-Error-Code": "RepoNotFound"})
        if self.status is not None:
            return self._send(handler, self.status, b"", {"X-Error-Code": self.error_code} if self.error_code else {})
        if handler.path.startswith("/api/models/"):
            return self._send(handler, 200, self._describe(handler.path), {"Content-Type": "application/json"})
        owner, repo, _, _, *rest = handler.path.lstrip("/").split("/")
        data = self.files.get("/".join([owner, repo, *rest]))
        if data is None:
            return self._send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
        self._send_file(handler, data, with_body)

    def _send_file(self, handler: BaseHTTPRequestHandler, data: bytes, with_body: bool) -> None:
        span, status, body = handler.headers.get("Range"), 200, data
        if with_body and span and not self.ignores_ranges:
            status, body = 206, data[int(span.removeprefix("bytes=").rstrip("-")) :]
        handler.send_response(status)
        handler.send_header("X-Repo-Commit", COMMIT)
        handler.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if not with_body:
            return
        if self.stalls:
            self.closing.wait()
        if self.break_after_bytes is None:
            handler.wfile.write(body)
        else:
            handler.wfile.write(body[: self.break_after_bytes])
            handler.close_connection = len(body) > self.break_after_bytes

    def _describe(self, path: str) -> bytes:
        owner, repo = path.removeprefix("/api/models/").split("/")[:2]
        prefix = f"{owner}/{repo}/"
        siblings = [
            {
                "rfilename": name.removeprefix(prefix),
                "size": len(data),
                "blobId": hashlib.sha1(data).hexdigest(),
                "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1},
            }
            for name, data in self.files.items()
            if name.startswith(prefix)
        ]
        return json.dumps({"id": f"{owner}/{repo}", "sha": COMMIT, "siblings": siblings}).encode()

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)
