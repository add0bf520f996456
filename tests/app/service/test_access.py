"""Who may talk to the service: modes, key, Host, Origin, bodies."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import httpx
import pytest

from chatkv.app.service import ownership
from chatkv.app.service.bodies import MAX_DEPTH

from .support import FakeModels, Running, running_service

BODY = {"messages": [{"role": "user", "content": "say hi"}]}


async def test_files_and_sockets_are_their_owners_alone(running: Running) -> None:
    assert stat.S_IMODE(running.paths.socket_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(running.paths.socket_path.parent.stat().st_mode) == 0o700
    for file in (running.paths.key_file, running.paths.service_lock, running.paths.chats_db):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


async def test_key_is_accepted_in_three_headers_and_asked_for_everywhere_but_health(running: Running) -> None:
    async with httpx.AsyncClient(base_url=running.url) as stranger:
        for path in ("/v1/models", "/metrics", "/chatkv/status", "/nowhere"):
            refused = await stranger.get(path)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await stranger.get("/health")).json() == {"status": "ok"}
        for headers in (
            {"Authorization": f"Bearer {running.key}"},
            {"authorization": f"bearer {running.key}"},
            {"x-api-key": running.key},
            {"api-key": running.key},
        ):
            assert (await stranger.get("/v1/models", headers=headers)).status_code == 200
        for wrong in ("x", running.key[:-1], running.key + "x", "é"):
            raw = {"Authorization": f"Bearer {wrong}".encode()}
            assert (await stranger.get("/v1/models", headers=raw)).status_code == 401


async def test_e12_host_is_checked_on_tcp_only(running: Running) -> None:
    for host in ("127.0.0.1", f"127.0.0.1:{running.port}", f"localhost:{running.port}", f"[::1]:{running.port}"):
        assert (await running.tcp.get("/health", headers={"Host": host})).status_code == 200, host
    for host in ("evil.example", f"evil.example:{running.port}", "127.0.0.1:1", "machine.local", "192.168.0.1", ""):
        refused = await running.tcp.get("/health", headers={"Host": host})
        assert refused.status_code == 403, host
        assert refused.json()["error"]["code"] == "host_not_allowed"
        assert (await running.unix.get("/health", headers={"Host": host})).status_code == 200


async def test_e13_pages_of_a_browser_are_refused_and_no_origin_is_reflected(running: Running) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = await running.tcp.post("/v1/chat/completions", json=BODY, headers=headers)
        assert refused.status_code == 403
        assert not [name for name in refused.headers if name.startswith("access-control")]
    preflight = await running.tcp.options("/v1/models", headers={"Origin": "https://evil.example"})
    assert preflight.status_code == 403


async def test_an_allowed_origin_gets_its_preflight_without_a_key(home: Path) -> None:
    page = "vscode-webview://abc"
    async with running_service(FakeModels(), allowed_origins=[page]) as running:
        await running.ready()
        async with httpx.AsyncClient(base_url=running.url) as stranger:
            preflight = await stranger.options("/v1/chat/completions", headers={"Origin": page})
        assert preflight.status_code == 204
        answer = await running.tcp.post("/v1/chat/completions", json=BODY, headers={"Origin": page})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == page


async def test_without_a_key_by_setting(home: Path) -> None:
    async with running_service(FakeModels(), no_key=True) as running:
        async with httpx.AsyncClient(base_url=running.url) as stranger:
            assert (await stranger.get("/v1/models")).status_code == 200


async def test_own_routes_do_not_exist_on_tcp(running: Running) -> None:
    for path in ("/chatkv/status", "/chatkv/chats", "/chatkv/models", "/chatkv"):
        assert (await running.tcp.get(path)).status_code == 404
    assert (await running.tcp.post("/chatkv/stop", json={})).status_code == 404
    assert (await running.unix.get("/chatkv/status")).status_code == 200


async def test_a_form_is_no_json(running: Running) -> None:
    for client in (running.tcp, running.unix):
        for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data"):
            refused = await client.post("/v1/chat/completions", content=b"{}", headers={"Content-Type": kind})
            assert refused.status_code == 415
            assert "application/json" in refused.json()["error"]["message"]
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert (await running.unix.post("/v1/chat/completions", content=b"x", headers=packed)).status_code == 415


async def test_bodies_have_limits(running: Running) -> None:
    async def post(content: bytes) -> httpx.Response:
        return await running.unix.post(
            "/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
        )

    deep = b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1)
    for content in (b"{", b"\xff\xfe", b"[]", b"null", b'{"a": NaN}', b'{"a":' + deep + b"}", b"[" * 100_000):
        refused = await post(content)
        assert refused.status_code == 400, content[:20]
        assert refused.json()["error"]["type"] == "invalid_request_error"

    async def endless() -> object:
        while True:
            yield b" " * 2**20

    too_long = await running.unix.post(
        "/v1/chat/completions", content=endless(), headers={"Content-Type": "application/json"}
    )
    assert too_long.status_code == 413


async def test_declared_length_is_believed_before_the_body_comes(running: Running) -> None:
    reader, writer = await asyncio.open_unix_connection(running.paths.socket_path)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99999999999\r\n\r\n"
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413")
    writer.close()


async def test_every_refusal_has_the_one_shape(running: Running) -> None:
    async def error_of(method: str, path: str, status: int, **options: object) -> None:
        answer = await running.unix.request(method, path, **options)  # type: ignore[arg-type]
        assert answer.status_code == status, (method, path, answer.text)
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error)
        assert "<html" not in answer.text.lower()

    await error_of("GET", "/", 404)
    await error_of("GET", "/v1/engines", 404)
    await error_of("GET", "/v1/chat/completions", 405)
    await error_of("DELETE", "/v1/models", 405)
    await error_of("GET", "/v1/models/unknown/model", 404)
    await error_of("GET", "/chatkv/chats?limit=many", 400)
    await error_of("GET", "/chatkv/chats/unknown", 404)
    await error_of("DELETE", "/chatkv/jobs/unknown", 404)
    await error_of("POST", "/v1/chat/completions", 400, json={})


async def test_no_length_is_411_and_no_http_is_json_too(running: Running) -> None:
    async def raw(request: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(running.paths.socket_path)
        writer.write(request)
        answer = await reader.read(4096)
        writer.close()
        return answer

    bare = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert (await raw(bare)).startswith(b"HTTP/1.1 411")
    head, _, body = (await raw(b"complete nonsense\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    huge = b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n"
    assert (await raw(huge)).startswith(b"HTTP/1.1 4")


async def test_another_users_connection_is_closed_at_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "peer_uid", lambda connection: os.getuid() + 1)
    with pytest.raises(httpx.TransportError):
        await running.unix.get("/health")
    monkeypatch.undo()
    assert (await running.unix.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"model": 5}, "model"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "template refuses"}]}, "messages"),
    ],
)
async def test_bad_values_name_their_field(running: Running, fields: dict[str, object], param: str) -> None:
    refused = await running.unix.post("/v1/chat/completions", json=BODY | fields)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert running.engine.requests == []
