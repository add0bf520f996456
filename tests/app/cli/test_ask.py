from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from chatkv.app.cli.ask import proof_line

from .shell import Shell, serving

ESCAPES = "say red \x1b]0;owned\x07 \x1b[31malert\x9b2J end"


def test_an_answer_is_all_that_reaches_stdout(chatkv: Shell) -> None:
    done = chatkv("ask", "say", "good day")
    assert (done.returncode, done.stdout, done.stderr) == (0, "good day\n", "")


def test_piped_text_comes_before_the_question(chatkv: Shell) -> None:
    assert chatkv("ask", "and then?", input="say one\ntwo\n").stdout == "one\ntwo\n\nand then?\n"
    assert chatkv("ask", input="say alone").stdout == "alone\n"


def test_an_answer_that_ends_a_line_gets_no_second_end(chatkv: Shell) -> None:
    assert chatkv("ask", "say one\n").stdout == "one\n"


def test_the_token_limit_has_its_own_exit_code(chatkv: Shell) -> None:
    done = chatkv("ask", "--max-tokens", "3", "say abcdef")
    assert (done.returncode, done.stdout) == (3, "abc\n")
    assert "chatkv ask -c" in done.stderr


def test_a_failure_of_the_engine_keeps_what_came(chatkv: Shell) -> None:
    done = chatkv("ask", "fail")
    assert (done.returncode, done.stdout) == (1, "oh\n")
    assert "failed on purpose" in done.stderr


def test_a_chat_goes_on_by_recency_id_and_title(chatkv: Shell) -> None:
    chatkv("ask", "-s", "Be brief.", "say alpha particle")
    first = chatkv.newest_chat()
    chatkv("ask", "say beta")
    assert chatkv("ask", "--chat", "alpha", "say two").returncode == 0
    assert chatkv("ask", "-c", "say three").returncode == 0
    assert chatkv("ask", "--chat", first[:8], "say four").returncode == 0
    shown = chatkv("chats", "show", first).stdout
    assert [word for word in ("two", "three", "four") if f"user:\nsay {word}\n" in shown] == ["two", "three", "four"]
    exported = json.loads(chatkv("chats", "export", first, "--format", "json").stdout)
    assert "Be brief." in json.dumps(exported["chat"])


def test_a_private_chat_leaves_nothing_on_disk(chatkv: Shell) -> None:
    assert chatkv("ask", "--private", "say unheard-of").returncode == 0
    data = b"".join(file.read_bytes() for file in chatkv.paths.data_dir.glob("chats.db*"))
    assert b"unheard-of" not in data


@pytest.mark.parametrize(
    ("arguments", "piped", "words"),
    [
        ((), b"", "There is no question"),
        (("hello",), b"\xff\xfe", "not UTF-8"),
        ((b"caf\xe9",), b"", "not UTF-8"),
        (("--temperature", "nan", "hello"), b"", "--temperature must be a number"),
        (("--temperature", "-3", "hello"), b"", "temperature must be between 0 and 2"),
        (("--max-tokens", "0", "hello"), b"", "max_tokens must be 1 or more"),
        (("-m", "nobody", "hello"), b"", "no model called 'nobody'"),
        (("-m", "qwen3-0.6b", "hello"), b"", "chatkv pull qwen3-0.6b"),
        (("--chat", "nobody", "hello"), b"", "No chat matches 'nobody'"),
        (("-c", "--private", "hello"), b"", "Only a new chat can be private"),
        (("x" * 5000,), b"", "context"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_no_chat(
    chatkv: Shell, arguments: tuple[str | bytes, ...], piped: bytes, words: str
) -> None:
    before = chatkv.num_chats
    done = chatkv("ask", *arguments, input=piped)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert chatkv.num_chats == before


def test_wrong_usage_is_exit_code_2(chatkv: Shell) -> None:
    done = chatkv("ask", "--no-such-option", "hello")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--no-such-option" in done.stderr


def test_nothing_to_go_on_with(bare: Shell) -> None:
    with serving(bare):
        done = bare("ask", "-c", "hello")
    assert done.returncode == 1
    assert "There is no chat to go on with" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_reply_and_keeps_it(chatkv: Shell, number: signal.Signals) -> None:
    process = chatkv.start("ask", "hold")
    assert process.stdout is not None
    assert process.stdout.read(7) == b"holding"
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
    assert said == b""
    reply = chatkv.last_message()
    assert (reply["status"], reply["content"]) == ("stopped", "holding")


def test_ctrl_c_on_a_terminal(chatkv: Shell) -> None:
    terminal = chatkv.on_terminal("ask", "hold")
    terminal.wait_for("holding")
    terminal.press("\x03")
    assert terminal.ended() == 130
    assert "Traceback" not in terminal.shown
    assert chatkv.last_message()["status"] == "stopped"


def test_a_reader_that_leaves_ends_the_reply_without_a_word(chatkv: Shell) -> None:
    process = chatkv.start("ask", "count 100000")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(3) == b"1 2"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(20) == 1
    assert chatkv.last_message()["status"] == "stopped"


def test_escapes_reach_a_pipe_but_no_terminal(chatkv: Shell) -> None:
    assert chatkv("ask", ESCAPES).stdout == ESCAPES.removeprefix("say ") + "\n"
    terminal = chatkv.on_terminal("ask", ESCAPES)
    assert terminal.ended() == 0, terminal.shown
    for text in (terminal.shown, shown(chatkv, "chats", "show", chatkv.newest_chat()), shown(chatkv, "chats", "list")):
        assert "alert" in text or "red" in text
        assert not any(control in text for control in ("\x1b]", "\x1b[31m", "\x9b", "\x07"))


def shown(chatkv: Shell, *arguments: str) -> str:
    terminal = chatkv.on_terminal(*arguments)
    assert terminal.ended() == 0, terminal.shown
    return terminal.shown


def test_a_terminal_is_told_what_was_reused(chatkv: Shell) -> None:
    text = shown(chatkv, "ask", "say hello")
    assert "hello\r\n" in text
    assert "reused 7/" in text
    assert "tok" in text


def test_theproof_line_says_only_what_is_known() -> None:
    stats = {"num_cached_tokens": 1984, "num_prompt_tokens": 2031, "ttft_s": 0.19, "tokens_per_s": 31.42}
    assert proof_line(stats) == "reused 1,984/2,031 tok · TTFT 0.19 s · 31.4 tok/s"
    assert proof_line(stats | {"tokens_per_s": None}) == "reused 1,984/2,031 tok · TTFT 0.19 s"
    assert proof_line(stats | {"tokens_per_s": None, "ttft_s": None}) == "reused 1,984/2,031 tok"


def test_a_service_that_dies_in_the_middle_loses_nothing(bare: Shell) -> None:
    with serving(bare) as service:
        process = bare.start("ask", "hold")
        assert process.stdout is not None
        assert process.stdout.read(7) == b"holding"
        service.kill()
        _, said = process.communicate(timeout=20)
        assert process.returncode == 1
        assert b"Traceback" not in said
        assert b"What came is kept: chatkv chats show " in said
        chat = said.partition(b"chats show ")[2].split()[0].decode()
        service.wait()
    with serving(bare):
        assert bare("chats", "show", chat).stdout.startswith("user:\nhold\n\nassistant (stopped):\n")


@pytest.mark.parametrize("answer", ["n\n", "\x03"])
def test_a_fresh_home_offers_the_model_and_takes_no_for_an_answer(bare: Shell, answer: str) -> None:
    terminal = bare.on_terminal("ask", "hello")
    terminal.wait_for("Download 98.4 MB now? [Y/n]")
    terminal.press(answer)
    assert terminal.ended() == (-signal.SIGINT if answer == "\x03" else 1)  # A shell calls that 130.
    assert "Traceback" not in terminal.shown


def test_asking_loads_neither_engine_nor_terminal_app(chatkv: Shell) -> None:
    code = (
        "import sys\nfrom chatkv.app.cli.command import app\n"
        "app(['ask', 'say', 'light'], standalone_mode=False)\n"
        "heavy = ('torch', 'transformers', 'numpy', 'textual', 'huggingface_hub', 'chatkv.engine', 'chatkv.kernels')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=chatkv.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "light\n[]\n"
