"""The service as a process: one per home, found by everybody, and gone without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from chatkv.app.client import Client, RefusedError, ServiceLostError, ensure_running
from chatkv.app.errors import UserError
from chatkv.app.paths import Paths
from chatkv.app.service.ownership import ServiceLock, can_connect

from .support import TIMEOUT_S, until

FAKE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")), "--detached")


@pytest.fixture
def paths(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paths]:
    monkeypatch.setenv("CHATKV_PORT", "0")
    paths = Paths.from_env()
    yield paths
    pid = ServiceLock(paths.service_lock).owner().get("pid")
    if pid and not ServiceLock(paths.service_lock).is_free():
        os.kill(pid, signal.SIGKILL)


def is_gone(paths: Paths) -> bool:
    return ServiceLock(paths.service_lock).is_free()


async def start(paths: Paths) -> Client:
    client = Client(paths, FAKE)
    status = await client.ensure_service()
    assert status["pid"] != os.getpid()
    return client


async def test_ten_clients_at_once_on_a_cold_machine_get_one_service_and_ten_answers(paths: Paths) -> None:
    async def ask() -> tuple[int, str]:
        async with Client(paths, FAKE) as client:
            status = await client.ensure_service()
            body = {"messages": [{"role": "user", "content": "say hi"}]}
            chunks = [chunk async for chunk in client.stream_completion(body)]
            return status["pid"], "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    answers = await asyncio.gather(*(ask() for _ in range(10)))
    assert len({pid for pid, _ in answers}) == 1
    assert [text for _, text in answers] == ["hi"] * 10
    # A service that is started by hand beside it attaches: it says who serves, and ends well.
    second = subprocess.run(FAKE, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert second.returncode == 0
    assert str(answers[0][0]) in second.stderr
    async with Client(paths) as client:
        assert await client.stop()
    assert not paths.socket_path.exists()
    assert is_gone(paths)


async def test_sigterm_flushes_running_replies_as_stopped_and_leaves_nothing(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATKV_FAKE_TOKENS_PER_S", "200")
    async with await start(paths) as client:
        chat = await client.create_chat()
        stream = client.events()
        await client.send_turn(chat["id"], "hold")
        pid = (await client.status())["pid"]
        seen = ""
        async for event in stream:
            seen += event.get("text", "")
            if event.get("text") and seen == "holding":
                os.kill(pid, signal.SIGTERM)
            if event["type"] == "reply_done":
                assert event["message"]["status"] == "stopped"
        await until(lambda: is_gone(paths))
        assert not paths.socket_path.exists()
        with pytest.raises(ServiceLostError):
            await client.status()
        await client.ensure_service()
        reply = (await client.get_chat(chat["id"]))["messages"][-1]
        assert (reply["status"], reply["content"]) == ("stopped", "holding")
        assert await client.stop()


async def test_kill_9_in_the_middle_of_a_reply_loses_at_most_a_quarter_second(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATKV_FAKE_TOKENS_PER_S", "100")
    async with await start(paths) as client:
        chat = await client.create_chat()
        await client.send_turn(chat["id"], "count 60")
        arrivals: list[tuple[float, int]] = []
        length = 0
        loop = asyncio.get_running_loop()
        async for event in client.events():
            if event["type"] == "reply_delta":
                length = event["offset"] + len(event["text"])
                arrivals.append((loop.time(), length))
            if length > 80:
                killed_at = loop.time()
                os.kill((await client.status())["pid"], signal.SIGKILL)
                break
        await until(lambda: is_gone(paths))
        assert paths.socket_path.exists()  # Stale: nobody could take it away.
        assert not can_connect(paths.socket_path)
        await client.ensure_service()
        shown = await client.get_chat(chat["id"])
        user, reply = shown["messages"]
        assert user["content"] == "count 60"
        whole = " ".join(map(str, range(1, 61)))
        assert whole.startswith(reply["content"])
        due = max((shown for at, shown in arrivals if at <= killed_at - 0.25), default=0)
        assert len(reply["content"]) >= due > 0
        assert reply["num_tokens"] == len(reply["content"])
        await client.continue_reply(chat["id"])
        while (shown := await client.get_chat(chat["id"]))["chat"]["state"] != "idle":
            await asyncio.sleep(0.01)
        assert shown["messages"][-1]["content"] == whole
        assert await client.stop()


async def test_a_client_that_meets_an_exiting_service_waits_for_its_lock(paths: Paths) -> None:
    paths.make_private()
    exiting = ServiceLock(paths.service_lock)
    assert exiting.try_acquire()
    starting = asyncio.create_task(ensure_running(paths, FAKE))
    start_lock = ServiceLock(paths.state_dir / "start.lock")
    await until(lambda: start_lock.file.exists() and not start_lock.is_free())
    assert not starting.done()
    exiting.release()
    assert await starting
    async with Client(paths) as client:
        assert await client.stop()


async def test_a_service_that_cannot_start_says_why(paths: Paths) -> None:
    paths.make_private()
    paths.settings_file.write_text("threads = 'many'\n")
    with pytest.raises(UserError) as refused:
        await ensure_running(paths, FAKE)
    assert "threads" in str(refused.value)
    paths.settings_file.unlink()
    paths.socket_path.write_text("not a socket")
    with pytest.raises(UserError) as refused:
        await ensure_running(paths, FAKE)
    assert "in the way" in str(refused.value)
    assert paths.socket_path.read_text() == "not a socket"


async def test_a_taken_port_turns_tcp_off_and_is_told(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        monkeypatch.setenv("CHATKV_PORT", port)
        async with await start(paths) as client:
            status = await client.status()
            assert status["url"] is None
            assert port in status["tcp_error"]
            assert await client.stop()
        named = [sys.executable, "-m", "chatkv.app.service", "--port", port]
        refused = subprocess.run(named, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert refused.returncode == 3
        assert port in refused.stderr
        assert "Traceback" not in refused.stderr


async def test_it_ends_by_itself_when_nobody_comes(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATKV_IDLE_EXIT_S", "0.2")
    async with await start(paths) as client:
        watching = client.events()
        assert (await anext(watching))["type"] == "hello"
        await watching.aclose()
        await until(lambda: is_gone(paths))
    assert not paths.socket_path.exists()


async def test_openai_client_over_tcp_and_unix_socket_and_curl(paths: Paths) -> None:
    import httpx2

    async with await start(paths) as client:
        status = await client.status()
        key = Path(status["key_file"]).read_text().strip()
        transport = httpx2.AsyncHTTPTransport(uds=status["socket"])
        over_unix = openai.AsyncOpenAI(
            base_url="http://chatkv/v1", api_key="none", http_client=httpx2.AsyncClient(transport=transport)
        )
        over_tcp = openai.AsyncOpenAI(base_url=f"{status['url']}/v1", api_key=key)
        for sdk in (over_unix, over_tcp):
            messages = [{"role": "user", "content": "say héllo"}]
            whole = await sdk.chat.completions.create(model="fake", messages=messages, n=2)  # type: ignore[arg-type]
            assert [choice.message.content for choice in whole.choices] == ["héllo"] * 2
            stream = await sdk.chat.completions.create(  # type: ignore[call-overload]
                model="", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == "héllo"
            assert chunks[-1].usage.completion_tokens == 6
            assert [model.id async for model in sdk.models.list()] == ["fake"]
            with pytest.raises(openai.NotFoundError, match="not installed"):
                await sdk.chat.completions.create(model="gpt-x", messages=messages)  # type: ignore[arg-type]
            with pytest.raises(openai.BadRequestError) as refused:
                await sdk.chat.completions.create(model="", messages=messages, temperature=3)  # type: ignore[arg-type]
            assert refused.value.param == "temperature"
            await sdk.close()
        curl = ["curl", "-sS", "--unix-socket", status["socket"], "http://chatkv/v1/chat/completions"]
        curl += ["-H", "Content-Type: application/json", "-d", '{"messages":[{"role":"user","content":"say hi"}]}']
        said = subprocess.run(curl, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        assert '"content":"hi"' in said.stdout
        assert await client.stop()


async def test_files_of_the_process_are_private_and_the_log_has_no_prompts(paths: Paths) -> None:
    async with await start(paths) as client:
        chat = await client.create_chat()
        [event async for event in client.stream_turn(chat["id"], "say secretword")]
        await client.search("secretword")
        with pytest.raises(RefusedError):
            await client.send_turn("unknown", "say secretword")
        assert (await client.status())["log_file"] == str(paths.log_file)
        assert await client.stop()
    for file in paths.state_dir.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file
        if file.suffix == ".log":
            assert "secretword" not in file.read_text()


async def test_http_is_up_without_torch(paths: Paths) -> None:
    """The real service, which has no model here."""
    async with Client(paths) as client:
        status = await client.ensure_service()
        assert status["model"]["state"] == "no_model"
        maps = Path(f"/proc/{status['pid']}/maps").read_text()
        assert "libtorch" not in maps
        descriptors = Path(f"/proc/{status['pid']}/fd")
        targets = [os.readlink(descriptors / number) for number in "012"]
        assert targets[0] == os.devnull
        assert targets[1] == targets[2] == str(paths.log_file.with_suffix(".stderr.log"))
        assert os.readlink(f"/proc/{status['pid']}/cwd") == "/"
        with pytest.raises(httpx.HTTPStatusError):
            async with httpx.AsyncClient(base_url=status["url"]) as stranger:
                (await stranger.get("/v1/models")).raise_for_status()
        assert await client.stop()
