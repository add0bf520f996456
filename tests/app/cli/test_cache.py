"""`chatkv cache`, with a scripted client in the service's place."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from chatkv.app.cli import cache
from chatkv.app.client import ServiceLostError
from chatkv.app.errors import UserError

from .shell import Shell

Json = dict[str, Any]


def _chat(number: int, **fields: Any) -> Json:
    chat = {
        "chat_id": f"{number}" * 24,
        "title": f"chat {number}",
        "is_pinned": False,
        "is_private": False,
        "num_tokens": 3098,
        "runs": [["device", 100], ["disk", 80], ["missing", 13]],
        "num_shared_blocks": 25,
        "last_used_at": time.time() - 9000,
        "resume_s": 0.42,
        "compute_s": 3.6,
        "is_running": False,
        "num_damaged": 0,
    }
    return chat | fields


def _report(**disk: Any) -> Json:
    return {
        "model": "smollm2-135m",
        "model_state": "ready",
        "kv_dtype": "fp32",
        "block_size": 16,
        "block_bytes": 737_280,
        "tiers": {
            "device": {
                "used_bytes": 2_000_000_000,
                "limit_bytes": 4_000_000_000,
                "num_blocks": 2712,
                "hit_tokens_24h": 60,
            },
            "host": None,
            "disk": {
                "state": "on",
                "notice": None,
                "used_bytes": 184_400_000,
                "limit_bytes": 50_000_000_000,
                "num_blocks": 250,
                "num_queued": 3,
                "hit_tokens_24h": 30,
                "written_today_bytes": 1_200_000,
                "read_bytes_per_s": 1.4e9,
                "slabs": [
                    {
                        "model": "smollm2-135m, fp32 KV",
                        "num_blocks": 250,
                        "bytes": 184_400_000,
                        "last_used_at": time.time() - 150,
                    },
                ],
            }
            | disk,
        },
        "computed_tokens_24h": 10,
        "prompt_tokens_24h": 100,
        "chats": [
            _chat(1),
            _chat(2, is_pinned=True, is_running=True, resume_s=None, runs=[["host", 1]], num_tokens=17),
        ],
        "shared": [{"num_blocks": 25, "num_tokens": 412, "label": "You plan trips", "chat_ids": ["1" * 24, "2" * 24]}],
        "evicts_next": "1" * 24,
    }


class ScriptedClient:
    """Answers as the service does, and writes down what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.report = _report()
        self.model_states = ["loading", "loading", "ready"]
        self.request: Json | None = None
        self.num_damaged = 0
        self.is_complete = True

    async def status(self) -> Json:
        return {"model": {"state": self.model_states.pop(0)}}

    async def cache(self) -> Json:
        return self.report

    async def list_chats(self, query: str = "", limit: int = 1000) -> list[Json]:
        return [{"id": f"{number}" * 24, "title": f"chat {number}"} for number in (1, 2)]

    async def forget_cache(self, chat_id: str) -> Json:
        self.told.append(("forget", chat_id))
        return {"num_removed": 1, "num_shared": 25, "is_complete": self.is_complete}

    async def clear_cache(self) -> Json:
        self.told.append("clear")
        return {"num_removed": 1250, "is_complete": self.is_complete}

    async def prune_cache(self) -> Json:
        return {"num_slabs": 2, "num_blocks": 40, "freed_bytes": 29_500_000}

    async def offload_chat(self, chat_id: str) -> Json:
        self.told.append(("offload", chat_id))
        return {"num_offloaded": 193}

    async def why_missed(self, chat_id: str | None = None) -> Json | None:
        self.told.append(("why", chat_id))
        return self.request

    async def verify_cache(self) -> AsyncGenerator[Json, None]:
        yield {"type": "progress", "num_checked": 100, "num_blocks": 250}
        yield {"type": "done", "num_checked": 250, "num_damaged": self.num_damaged}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ScriptedClient:
    scripted = ScriptedClient()

    def with_client(use: Callable[[Any], Awaitable[Any]], *, start: bool = True) -> Any:
        return asyncio.run(_awaited(use, scripted))

    monkeypatch.setattr(cache, "with_client", with_client)
    monkeypatch.setattr(cache, "LOADING_POLL_S", 0.0)
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    return scripted


async def _awaited(use: Callable[[Any], Awaitable[Any]], client: Any) -> Any:
    return await use(client)


@pytest.fixture
def no_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The store's directory of a home where nothing runs."""

    def with_client(use: object, *, start: bool = True) -> Any:
        assert not start, "a service was started"
        raise ServiceLostError

    monkeypatch.setattr(cache, "with_client", with_client)
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path))
    return tmp_path / "cache" / "kv"


def _run(*arguments: str, input: str = "") -> Result:
    done = CliRunner().invoke(cache.app, arguments, input=input)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def _lines(*arguments: str) -> list[str]:
    done = _run(*arguments)
    assert done.exit_code == 0
    return done.stdout.splitlines()


def test_status_tells_sizes_hit_rates_and_what_was_written(client: ScriptedClient) -> None:
    named = {line[:12].strip(): line[13:] for line in _lines("status")}
    assert named["model"] == "smollm2-135m, blocks of 16 tokens = 737.3 kB fp32"
    assert named["device"].startswith("████████────────  2.0 GB of 4.0 GB, 2,712 blocks, 60 % of a day's prompt tokens")
    assert named["host"].startswith("off")
    assert named["disk"].startswith("░───────────────  184.4 MB of 50.0 GB, 250 blocks, 30 % of")
    assert named["computed"].startswith("10 % of")
    assert named["written"] == "1.2 MB today, 3 blocks waiting, reads at 1.4 GB/s"
    assert named["store"].endswith("cache/kv")
    assert named[""] == "smollm2-135m, fp32 KV: 250 blocks, 184.4 MB, last used 2m ago"
    assert _lines() == _lines("status")
    disk = client.report["tiers"]["disk"]
    disk["is_encrypted"] = disk["slabs"][0]["is_open"] = True
    assert _lines("status")[-2:] == [
        named["store"].join(("store        ", ", encrypted")),
        "             smollm2-135m, fp32 KV: 250 blocks, 184.4 MB, in use now",
    ]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("off", "off by setting"),
        ("memory_only", "not used: everything stays in memory"),
        ("opening", "being opened"),
    ],
)
def test_status_without_a_disk_store_says_why(client: ScriptedClient, state: str, words: str) -> None:
    client.report = _report(state=state, notice="The store is in use by \x1b[31manother home.", slabs=[])
    named = {line[:12].strip(): line[13:] for line in _lines("status")}
    assert named["disk"] == words
    assert named["notice"].endswith("another home.")
    assert "\x1b" not in named["notice"]
    assert "written" not in named


def test_status_without_a_model_and_a_day_without_prompts(client: ScriptedClient) -> None:
    client.report |= {"model": None, "block_bytes": 0, "prompt_tokens_24h": 0}
    client.report["tiers"]["device"] = None
    client.report["tiers"]["disk"]["hit_tokens_24h"] = 0
    text = _run("status").stdout
    assert "none is loaded" in text
    assert "\ndevice       empty\n" in text
    assert "prompt tokens" not in text
    client.report["model_state"] = "loading"
    assert _lines("status")[0] == "model        being loaded"


def test_status_without_a_service_counts_the_files_and_starts_none(no_service: Path) -> None:
    assert _lines("status")[0].startswith("No service runs. On disk 0 B are kept, in ")
    no_service.mkdir(parents=True)
    (no_service / "slab").write_bytes(b"x" * 100_000)
    found = json.loads(_run("status", "--json").stdout)
    assert found.pop("used_bytes") >= 100_000
    assert found == {"running": False, "directory": str(no_service)}


def test_json_is_what_the_service_said(client: ScriptedClient, tmp_path: Path) -> None:
    status = json.loads(_run("status", "--json").stdout)
    assert status == {"running": True, "directory": str(tmp_path / "cache" / "kv"), **client.report}
    chats = json.loads(_run("chats", "--json").stdout)
    assert chats == {key: client.report[key] for key in ("model", "block_size", "chats", "shared", "evicts_next")}
    assert json.loads(_run("forget", "chat 1", "--json").stdout)["num_shared"] == 25
    assert json.loads(_run("clear", "--yes", "--json").stdout)["num_removed"] == 1250
    assert json.loads(_run("prune", "--json").stdout)["freed_bytes"] == 29_500_000
    assert json.loads(_run("offload", "chat 1", "--json").stdout) == {"num_offloaded": 193}
    assert json.loads(_run("verify", "--json").stdout) == {"type": "done", "num_checked": 250, "num_damaged": 0}
    assert json.loads(_run("why", "--json").stdout) is None


def test_chats_on_a_terminal_show_where_the_blocks_lie(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "is_terminal", lambda: True)
    head, first, second, legend, shared, evicted = _lines("chats")
    assert head.split() == ["id", "chat", "tokens", "resume", "compute", "used", "blocks"]
    assert "███████" in first
    assert "░░░░░░" in first
    assert first.index("█") < first.index("░") < first.index("·")
    assert first.split()[0] == "1" * 8
    assert [word in first for word in ("3,098", "0.42 s", "3.6 s", "2h")] == [True] * 4
    assert "▓" in second
    assert "running, pinned" in second
    assert legend == "█ device  ▓ host  ░ disk  · missing"
    assert shared == "2 chats share 412 tokens, kept once: You plan trips"
    assert evicted == "Evicted next: chat 1"


@pytest.mark.parametrize("columns", [80, 72])
def test_the_table_of_chats_fits_a_narrow_terminal(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(cache, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    client.report["chats"][0]["title"] = "a title that is much too long for any terminal " * 3
    client.report["shared"] = []
    client.report["evicts_next"] = None
    head, first, *rest = _lines("chats")
    assert max(map(len, (head, first, *rest))) <= columns
    fields = ("1" * 8, "a title", "…", "3,098", "0.42 s", "3.6 s", "2h", "█", "·")
    assert [word for word in fields if word not in first] == []


def test_chats_in_a_pipe_are_lines_of_fields(client: ScriptedClient) -> None:
    first, second = (line.split("\t") for line in _lines("chats"))
    assert first == ["1" * 24, "chat 1", "3098", "100", "0", "80", "13", "0.420", "3.600", "evicted next"]
    assert second == ["2" * 24, "chat 2", "17", "0", "1", "0", "0", "", "3.600", "running, pinned"]
    assert client.model_states == []  # It waited until the model was there.


def test_forgetting_says_what_went_and_what_stays(client: ScriptedClient) -> None:
    assert _lines("forget", "chat 2") == ["1 block removed.", "25 blocks kept, because other chats share them."]
    assert client.told == [("forget", "2" * 24)]
    with pytest.raises(UserError, match="No chat matches 'nobody'"):
        _run("forget", "nobody")
    client.is_complete = False
    assert "could not be removed from the disk yet" in _run("forget", "1" * 8).stderr


def test_clearing_wants_a_yes(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no terminal here to ask(.|\n)*--yes"):
        _run("clear", input="y\n")
    assert client.told == []
    assert _lines("clear", "--yes") == ["The cache is empty: 1,250 blocks removed."]
    assert client.told == ["clear"]


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("\n", 1), ("\x03", -signal.SIGINT)])
def test_a_no_on_the_terminal_clears_nothing_and_starts_nothing(bare: Shell, answer: str, code: int) -> None:
    terminal = bare.on_terminal("cache", "clear")
    terminal.wait_for("Clear the cache? [y/N]")
    terminal.press(answer)
    assert terminal.ended() == code
    assert ("Nothing was removed" in terminal.shown) == (code == 1)
    assert not bare.paths.state_dir.exists()


def test_prune_and_offload_say_what_they_freed(client: ScriptedClient) -> None:
    assert _lines("prune") == ["40 blocks of removed models are gone: 29.5 MB freed."]
    assert _lines("offload", "chat 1") == ["193 blocks freed on the device."]
    assert client.told == [("offload", "1" * 24)]


def test_nothing_is_on_the_device_of_no_service(no_service: Path) -> None:
    assert _lines("offload", "chat 1") == ["0 blocks freed on the device."]
    assert _lines("why") == ["Nothing was asked since the service was started, or it is forgotten."]


def test_verify_ends_with_a_code_that_scripts_can_use(client: ScriptedClient) -> None:
    assert _lines("verify") == ["250 blocks read, all sound."]
    client.num_damaged = 2
    done = _run("verify")
    assert (done.exit_code, done.stdout) == (
        1,
        "250 blocks read, 2 damaged ones removed: their chats compute them again.\n",
    )


def test_why_shows_both_texts(client: ScriptedClient) -> None:
    client.request = {"num_prompt_tokens": 2031, "num_cached_tokens": 400, "cached_by_tier": {"device": 0, "disk": 400}}
    client.request["load"] = None
    miss = {"position": 412, "text_before": "Today is ", "text": "Tuesday", "expected_text": "Monday\n"}
    assert _after(client, miss, "chat 1") == [
        "400 of 2,031 prompt tokens were reused (400 from disk).",
        "At token 412 it left what was kept:",
        "  after   “Today is ”",
        "  kept    “Monday\\n”",
        "  prompt  “Tuesday”",
    ]
    assert client.told == [("why", "1" * 24)]
    assert _after(client, miss | {"expected_text": ""})[1:] == [
        "Nothing was kept of its last 1,631 tokens, from token 412 on: “Tuesday”."
    ]
    assert _after(client, None)[1:] == ["Nothing that was kept was missed."]


def test_why_says_that_a_turn_brought_only_new_text(client: ScriptedClient) -> None:
    client.request = {"num_prompt_tokens": 2031, "num_cached_tokens": 2000, "cached_by_tier": {"device": 2000}}
    client.request |= {"load": None, "num_recomputed_tokens": 0}
    miss = {"position": 2000, "text_before": "Today is ", "text": "Tuesday", "expected_text": "Monday\n"}
    for shown in (miss, miss | {"expected_text": ""}, None):
        assert _after(client, shown)[1:] == ["Only its new text was computed: 31 of 2,031 tokens."]
    client.request |= {"num_recomputed_tokens": 1984, "num_cached_tokens": 0}
    assert _after(client, miss | {"position": 0, "expected_text": ""})[1:] == [
        "1,984 tokens of its earlier text were not kept, from token 0 on: “Tuesday”."
    ]
    assert len(_after(client, miss)[1:]) == 4


def test_why_tells_of_the_choice_between_loading_and_computing(client: ScriptedClient) -> None:
    client.request = {"num_prompt_tokens": 2031, "num_cached_tokens": 1984, "cached_by_tier": {"disk": 1984}}
    load = {"num_tokens": 1984, "load_s": 0.08, "compute_s": 3.14, "is_loaded": True, "num_loaded_tokens": 1968}
    client.request["load"] = load
    assert _after(client, None)[1] == (
        "1,984 tokens lay below the device; "
        "loading was to take 0.08 s against 3.1 s to compute them: 1,968 were loaded."
    )
    client.request["load"] = load | {"is_loaded": False}
    assert _after(client, None)[1].endswith(": they were computed.")


def _after(client: ScriptedClient, miss: Json | None, *arguments: str) -> list[str]:
    assert client.request is not None
    client.request["miss"] = miss
    return _lines("why", *arguments)


def test_the_commands_load_neither_engine_nor_terminal_app(bare: Shell) -> None:
    code = (
        "import sys\nfrom chatkv.app.cli.command import app\nimport chatkv.app.cli.cache_text\n"
        "app(['cache', 'status', '--json'], standalone_mode=False)\n"
        "heavy = ('torch', 'transformers', 'numpy', 'textual', 'chatkv.engine', 'chatkv.kernels')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=bare.environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("}\n[]\n")
    assert not list(bare.home.iterdir())
