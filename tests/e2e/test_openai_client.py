"""The openai package and curl against the real service, over TCP and the unix socket."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx2
import openai
import pytest

from tests.running_service import MODEL, RunningService

QUESTION = [{"role": "user", "content": "Name three colours."}]


async def client_of(service: RunningService, transport: str) -> openai.AsyncOpenAI:
    status = await service.status()
    if transport == "tcp":
        return openai.AsyncOpenAI(base_url=f"{status['url']}/v1", api_key=Path(status["key_file"]).read_text().strip())
    http = httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=status["socket"]))
    return openai.AsyncOpenAI(base_url="http://chatkv/v1", api_key="unused", http_client=http)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_openai_streams_what_it_answers_without_streaming(service: RunningService, transport: str) -> None:
    client = await client_of(service, transport)
    assert [model.id async for model in await client.models.list()] == [MODEL]
    whole = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    streamed, usage = "", None
    async for chunk in await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert len(streamed) > 10
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 24
    # The second request finds the prompt of the first.
    assert usage.prompt_tokens_details.cached_tokens >= 16 * ((usage.prompt_tokens - 1) // 16)


async def test_a_wrong_key_is_refused(service: RunningService) -> None:
    status = await service.status()
    client = openai.AsyncOpenAI(base_url=f"{status['url']}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        await client.models.list()


async def test_curl_over_the_unix_socket(service: RunningService) -> None:
    body = json.dumps({"model": "default", "messages": QUESTION, "max_tokens": 5})
    command = ["curl", "-sS", "--unix-socket", service.socket_path, "http://chatkv/v1/chat/completions"]
    command += ["-H", "Content-Type: application/json", "-d", body]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert answer["model"] == MODEL
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"
