from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from chatkv.app.cli import models, service
from chatkv.app.cli.output import human_age
from chatkv.app.client import Client
from chatkv.app.errors import UserError
from chatkv.app.paths import Paths
from tests.app.hub.hub_server import FakeHub

from .shell import Shell, serving

COMMANDS = ("ask", "serve", "stop", "status", "pull", "models", "rm", "chats", "cache")
STATUS_FIELDS = {
    *("running", "version", "pid", "socket", "url", "key_file", "device", "model", "tiers", "num_running"),
    *("num_waiting", "settings_file", "log_file", "home"),
}


def test_every_command_explains_itself(bare: Shell) -> None:
    text = bare("--help").stdout
    assert all(f" {name} " in text for name in COMMANDS)
    assert "terminal app" in text
    for name in COMMANDS:
        done = bare(name, "--help")
        assert (done.returncode, "--help" in done.stdout) == (0, True)
    assert not list(bare.home.iterdir())


def test_the_version(bare: Shell) -> None:
    done = bare("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("chatkv ")


def test_an_unknown_command_is_wrong_usage(bare: Shell) -> None:
    done = bare("frobnicate")
    assert (done.returncode, done.stdout) == (2, "")
    assert "frobnicate" in done.stderr


def test_without_a_service_status_and_stop_say_so_and_start_none(bare: Shell) -> None:
    assert bare("status").stdout.startswith("service      not running\n")
    status = json.loads(bare("status", "--json").stdout)
    assert (status["running"], status["socket"]) == (False, str(bare.paths.socket_path))
    stopped = bare("stop")
    assert (stopped.returncode, stopped.stdout) == (0, "No service runs.\n")
    assert not list(bare.home.iterdir())


def test_status_names_what_scripts_need(chatkv: Shell) -> None:
    status = json.loads(chatkv("status", "--json").stdout)
    assert status.keys() >= STATUS_FIELDS
    assert status["socket"] == str(chatkv.paths.socket_path)
    assert Path(status["key_file"]).stat().st_mode & 0o777 == 0o600
    assert status["url"].startswith("http://127.0.0.1:")
    names = [line.split()[0] for line in chatkv("status").stdout.splitlines()]
    assert names[:4] == ["service", "version", "model", "device"]
    assert {"URL", "socket", "key", "settings", "log", "models"} <= set(names)


def test_two_homes_run_side_by_side(chatkv: Shell, bare: Shell) -> None:
    with serving(bare) as other:
        assert json.loads(bare("status", "--json").stdout)["pid"] == other.pid
        assert json.loads(chatkv("status", "--json").stdout)["pid"] != other.pid
        assert bare("stop").stdout == "The service has stopped.\n"
        assert other.wait(20) == 0
    assert json.loads(chatkv("status", "--json").stdout)["running"]


def test_chats_in_a_pipe_are_lines_of_fields(chatkv: Shell) -> None:
    chatkv("ask", "say the\tquick\nbrown fox")
    chat_id, title, num_messages, age, state = chatkv("chats", "list", "-n", "1").stdout.rstrip("\n").split("\t")
    assert (num_messages, age, state) == ("2", "now", "idle")
    assert "\n" not in title
    assert chatkv("chats").stdout.startswith(chat_id)
    assert chatkv("chats", "search", "brown").stdout.split("\t")[0] == chat_id
    assert chatkv("chats", "list", "no such title").stdout == ""
    assert chatkv("chats", "search", "xylophone").stdout == ""
    assert chatkv("chats", "show", chat_id[:10]).stdout.startswith("user:\nsay the\tquick\nbrown fox\n\nassistant:\n")


def test_an_export_is_markdown_or_json(chatkv: Shell, tmp_path: Path) -> None:
    chatkv("ask", "say exported")
    chat = chatkv.newest_chat()
    assert "## Assistant" in chatkv("chats", "export", chat).stdout
    exported = json.loads(chatkv("chats", "export", chat, "--format", "json").stdout)
    assert [message["role"] for message in exported["messages"]] == ["user", "assistant"]
    file = tmp_path / "chat.md"
    assert chatkv("chats", "export", chat, "-o", str(file)).stdout == ""
    assert "exported" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("chats", "show", "nobody"), "No chat matches 'nobody'"),
        (("chats", "export", "nobody"), "No chat matches 'nobody'"),
        (("rm", "nobody"), "'nobody' is not installed"),
        (("pull", "smollm2-135"), "Did you mean smollm2-135m"),
        (("pull", "hf:"), "Write hf:OWNER/REPO"),
        (("pull", "./nothing.gguf"), "nothing.gguf does not exist"),
        (("serve", "--host", "0.0.0.0"), "this machine only"),
        ((), "chatkv ask"),
    ],
)
def test_a_mistake_is_one_message(chatkv: Shell, arguments: tuple[str, ...], words: str) -> None:
    done = chatkv(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr


def test_several_matches_are_listed_and_none_is_taken(chatkv: Shell) -> None:
    chatkv("ask", "say twin one")
    chatkv("ask", "say twin two")
    done = chatkv("chats", "show", "say twin")
    assert done.returncode == 1
    assert "matches 2 chats" in done.stderr


def test_an_export_that_cannot_be_written_or_named(chatkv: Shell) -> None:
    chatkv("ask", "say exported")
    chat = chatkv.newest_chat()
    assert "Cannot write /nonexistent/x" in chatkv("chats", "export", chat, "-o", "/nonexistent/x").stderr
    assert "no export format 'xml'" in chatkv("chats", "export", chat, "--format", "xml").stderr


def test_the_terminal_app_without_a_terminal_points_to_ask(bare: Shell) -> None:
    for variables in ({"TERM": "dumb"}, {"TERM": ""}):
        terminal = bare.on_terminal(**variables)
        assert terminal.ended() == 1
        assert "chatkv ask" in terminal.shown


def test_models_in_a_pipe_and_on_a_terminal(chatkv: Shell) -> None:
    rows = [line.split("\t") for line in chatkv("models").stdout.splitlines()]
    assert {len(row) for row in rows} == {6}
    states = {row[0]: row[1] for row in rows}
    assert (states["fake"], states["smollm2-135m"]) == ("loaded", "available")
    terminal = chatkv.on_terminal("models")
    assert terminal.ended() == 0
    assert "licence" in terminal.shown


@pytest.mark.parametrize(("key", "code"), [("n\n", 1), ("\n", 1), ("\x03", -2)])
def test_the_loaded_model_is_removed_only_when_told_so(chatkv: Shell, key: str, code: int) -> None:
    terminal = chatkv.on_terminal("rm", "fake")
    terminal.wait_for("[y/N]")
    terminal.press(key)
    assert terminal.ended() == code
    piped = chatkv("rm", "fake", input="y\n")
    assert piped.returncode == 1
    assert "--force" in piped.stderr
    assert chatkv("ask", "say here").returncode == 0


def test_a_forced_removal(bare: Shell) -> None:
    with serving(bare):
        bare("ask", "say loaded")
        done = bare("rm", "fake", "--force")
        assert (done.returncode, done.stdout) == (0, "fake is removed.\n")
        asked = bare("ask", "-c", "again")
        assert asked.returncode == 1
        assert "not installed" in asked.stderr


@pytest.mark.parametrize("message", ["", "tiny is installed", "tiny is installed; it came without a chat template"])
def test_a_pull_says_under_which_name_the_model_is_installed(
    message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "with_client", lambda use: {"name": "tiny", "message": message})
    models.pull("hf:me/repo/Tiny.gguf")
    assert capsys.readouterr().out == f"{message or 'tiny is installed'}.\n"


def test_ctrl_c_ends_a_pull_and_says_what_is_kept(bare: Shell) -> None:
    with FakeHub({"me/tiny/model.gguf": b"x" * 100_000}, stalls=True) as hub:
        shell = Shell(bare.home, HF_ENDPOINT=hub.url, HF_HOME=str(bare.home / "hub"), HF_HUB_OFFLINE="0")
        with serving(shell):
            terminal = shell.on_terminal("pull", "hf:me/tiny/model.gguf")
            terminal.wait_for("from hf:me/tiny/model.gguf")
            terminal.press("\x03")
            assert terminal.ended() == 130
            assert "What was downloaded is kept" in terminal.shown

            async def states() -> set[str]:
                async with Client(shell.paths) as client:
                    return {job["state"] for job in await client.list_jobs()}

            assert asyncio.run(states()) <= {"cancelled", "running"}
            hub.closing.set()


async def test_a_service_that_hangs_is_not_called_stopped(bare: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ANSWER_TIMEOUT_S", 0.05)
    paths = bare.paths
    paths.make_private()
    paths.service_lock.write_text('{"pid": 4711}')
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(paths.socket_path))
        listener.listen()
        async with Client(paths) as client:
            with pytest.raises(UserError, match=r"\(pid 4711\) has not answered(.|\n)*kill -9 4711"):
                await service.answer_in_time(paths, client.status())


def test_serve_refuses_an_unknown_model_before_it_serves(bare: Shell) -> None:
    done = bare("serve", "-m", "nobody")
    assert done.returncode == 1
    assert "'nobody' is not installed" in done.stderr
    assert not Paths.under(bare.home).socket_path.exists()


def test_a_damaged_chat_database_is_told(bare: Shell) -> None:
    with serving(bare):
        bare("ask", "say kept")
    bare.paths.chats_db.write_bytes(b"no database " * 1000)
    with serving(bare):
        listed = bare("chats", "list")
        assert (listed.returncode, listed.stdout) == (0, "")
        assert "The chat database was damaged: 0 chats with 0 messages were kept" in listed.stderr
        assert "chats.db.damaged-" in listed.stderr
        assert "\nnotice " in bare("status").stdout


def test_ages() -> None:
    ages = [human_age(seconds) for seconds in (0, 59, 60, 3599, 3600, 86399, 86400, 864000)]
    assert ages == ["now", "now", "1m", "59m", "1h", "23h", "1d", "10d"]


def test_a_service_of_another_version_is_named(
    chatkv: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHATKV_HOME", str(chatkv.home))
    monkeypatch.setattr("chatkv.app.client.client.version", lambda name: "99.0")
    models.models()
    shown = capsys.readouterr()
    assert "fake" in shown.out  # it is used all the same
    assert "chatkv stop" in shown.err
