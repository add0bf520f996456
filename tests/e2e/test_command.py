"""The commands as a shell runs them, against the real model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chatkv.app.client import Client
from chatkv.app.paths import Paths
from tests.running_service import MODEL

from .conftest import Run


def test_ask_answers_continues_and_is_kept(chatkv: Run) -> None:
    first = chatkv("ask", "--temperature", "0", "--max-tokens", "400", "Reply with one short sentence about rivers.")
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.strip()) > 5
    again = chatkv("ask", "-c", "--max-tokens", "4", "Go on.")
    assert again.returncode == 3  # cut by the token limit, and it says so
    assert "limit" in again.stderr
    listed = chatkv("chats", "list").stdout.splitlines()
    assert len(listed) == 1
    chat_id, _, num_messages = listed[0].split("\t")[:3]
    assert num_messages == "4"
    assert first.stdout.strip() in chatkv("chats", "show", chat_id).stdout
    exported = json.loads(chatkv("chats", "export", chat_id, "--format", "json").stdout)
    assert "rivers" in json.dumps(exported)
    assert chatkv("chats", "search", "rivers").stdout.startswith(chat_id)


def test_ask_reads_stdin_before_the_question(chatkv: Run) -> None:
    answer = chatkv("ask", "--max-tokens", "4", "What is this?", input="A list of rivers.\n")
    assert answer.returncode == 3
    chat_id = chatkv("chats", "list").stdout.split("\t")[0]
    assert "A list of rivers.\n\nWhat is this?" in chatkv("chats", "show", chat_id).stdout


def test_mistakes_get_a_message_and_no_trace(chatkv: Run) -> None:
    for arguments, code, words in (
        (("ask",), 1, "no question"),
        (("ask", "-m", "no-such-model", "hello"), 1, "no-such-model"),
        (("ask", "--temperature", "9", "hello"), 1, "temperature"),
        (("chats", "show", "nothing-like-it"), 1, "nothing-like-it"),
        (("rm", "no-such-model"), 1, "no-such-model"),
        (("pull", "no-such-model"), 1, "no-such-model"),
        (("nonsense",), 2, "nonsense"),
        ((), 1, "chatkv ask"),
    ):
        result = chatkv(*arguments)
        assert result.returncode == code, (arguments, result.stderr)
        assert words in result.stderr, (arguments, result.stderr)
        assert "Traceback" not in result.stdout + result.stderr


def test_the_loaded_model_is_not_removed_by_mistake(chatkv: Run) -> None:
    assert chatkv("ask", "--max-tokens", "1", "hello").returncode == 3
    refused = chatkv("rm", MODEL)
    assert refused.returncode == 1
    assert "loaded" in refused.stderr
    assert MODEL in chatkv("models").stdout


def test_ten_cold_clients_share_one_service(e2e_home: Path, chatkv: Run) -> None:
    environment = {**os.environ, "CHATKV_HOME": str(e2e_home), "CHATKV_PORT": "0"}
    command = [sys.executable, "-m", "chatkv.app", "ask", "--max-tokens", "3", "hello"]
    clients = [
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        for _ in range(10)
    ]
    answers = [client.communicate(timeout=180)[0] for client in clients]
    assert [client.returncode for client in clients] == [3] * 10
    assert all(answer.strip() for answer in answers)
    started = (Paths.under(e2e_home).log_file).read_text().count("serving")
    assert started <= 1
    assert len(chatkv("chats", "list").stdout.splitlines()) == 10


def num_flushes(paths: Paths) -> int:
    """Pieces that the database has of the reply that is being written."""
    with contextlib.closing(sqlite3.connect(f"file:{paths.chats_db}?mode=ro", uri=True)) as database:
        return int(database.execute("select count(*) from reply_chunks").fetchone()[0])


async def test_a_killed_service_loses_a_quarter_of_a_second_at_most(
    e2e_home: Path, chatkv: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATKV_HOME", str(e2e_home))  # where a client starts a service
    monkeypatch.setenv("CHATKV_PORT", "0")
    assert await asyncio.to_thread(chatkv, "ask", "--max-tokens", "1", "warm up")
    paths = Paths.under(e2e_home)
    shown = ""
    arrivals: list[tuple[float, int]] = []
    killed_at = 0.0
    async with Client(paths) as client:
        status = await client.status()
        chat = await client.create_chat(sampling={"temperature": 0, "max_tokens": 4000})
        try:
            async for event in client.stream_turn(chat["id"], "Write a very long story about a river."):
                shown += event.get("text", "")
                if event["type"] == "reply_delta" and not killed_at:
                    arrivals.append((time.perf_counter(), event["num_tokens"]))
                    if num_flushes(paths) > 2:
                        killed_at = time.perf_counter()
                        os.kill(status["pid"], signal.SIGKILL)
        except Exception:  # the connection broke with the process; how is the transport's affair
            pass
    async with Client(paths) as client:
        await client.ensure_service()
        messages = (await client.get_chat(chat["id"]))["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"]
        kept = messages[1]
        assert kept["status"] == "stopped"
        assert kept["content"]
        assert shown.startswith(kept["content"]) or kept["content"].startswith(shown)
        due = max((num_tokens for at, num_tokens in arrivals if at <= killed_at - 0.25), default=0)
        assert kept["num_tokens"] >= due > 0
        reply = await client.continue_reply(chat["id"])
        assert reply["id"] == kept["id"]
        async for event in client.events():
            if event["type"] == "reply_done" and event["message"]["id"] == kept["id"]:
                assert event["message"]["content"].startswith(kept["content"])
                break
            if event["type"] == "reply_delta" and event["num_tokens"] > kept["num_tokens"] + 5:
                await client.cancel(chat["id"])
