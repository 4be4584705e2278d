"""Requests of the openai client through a router, sent at random instants, and what became of each."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from openai import AsyncOpenAI, OpenAIError

__all__ = ["Ask", "Got", "draw_mix", "open_client", "send_all", "write_client_times"]

_WORDS = ("router", "server", "snapshot", "queue", "token", "prompt", "answer", "latency", "batch", "cache", "decode")
_FIRST_ID = 10  # below are ids that tokenizers keep for themselves


@dataclass(frozen=True)
class Ask:
    """A request: `kind` is ids, text or chat; the lengths of text are those of ids only about."""

    key: str
    at_s: float
    kind: str
    prompt: int
    output: int

    @property
    def engine_key(self) -> str:
        """The id that vLLM gives it, without its random end."""
        return f"chatcmpl-{self.key}" if self.kind == "chat" else f"cmpl-{self.key}-0"


@dataclass
class Got:
    """What the client saw of a request; instants are of CLOCK_MONOTONIC [ns], 0: never."""

    ask: Ask
    instance: str = ""
    predicted_ttft_s: float | None = None
    fallback: str = ""
    sent_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish: str | None = None
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return (self.first_ns - self.sent_ns) / 1e9


def draw_mix(count: int, seed: int, name: str, rate_rps: float = 1.0) -> list[Ask]:
    """Draw requests with short and long prompts and answers, in all combinations, arriving as a Poisson process.

    The rate changes nothing but the instants.
    """
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1.0, count)) / rate_rps
    asks = []
    for number in range(count):
        prompt = int(rng.integers(300, 800) if rng.random() < 0.5 else rng.integers(16, 80))
        output = int(rng.integers(48, 96) if rng.random() < 0.5 else rng.integers(4, 16))
        kind = ("ids", "text", "chat")[int(rng.integers(3))]
        asks.append(Ask(f"{name}-{number}", float(at[number]), kind, prompt, output))
    return asks


def open_client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=600.0)


async def send_all(client: AsyncOpenAI, asks: Sequence[Ask], model: str = "auto") -> list[Got]:
    """Send requests at their instants from now, whatever becomes of the others; return what became of each."""
    begin = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_one(client, each, begin + each.at_s, model)) for each in asks]
    return [each.result() for each in tasks]


async def _one(client: AsyncOpenAI, ask: Ask, at: float, model: str) -> Got:
    got = Got(ask)
    await asyncio.sleep(max(at - asyncio.get_running_loop().time(), 0))
    got.sent_ns = time.monotonic_ns()
    try:
        await _stream(client, ask, got, model)
    except OpenAIError as error:
        got.error = f"{type(error).__name__}: {error}"
    except Exception as error:  # the transport's own, where an answer breaks off
        if type(error).__module__.partition(".")[0] not in {"httpx", "httpcore"}:
            raise
        got.error = f"{type(error).__name__}: {error}"
    return got


async def _stream(client: AsyncOpenAI, ask: Ask, got: Got, model: str) -> None:
    rng = np.random.default_rng(int.from_bytes(ask.key.encode()[-6:], "little"))
    options = {
        "model": model,
        "max_tokens": ask.output,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
        "extra_headers": {"X-Request-Id": ask.key},
    }
    text = " ".join(rng.choice(_WORDS, ask.prompt))  # a word is a token
    if ask.kind == "chat":
        options["messages"] = [{"role": "user", "content": text}]
        raw = await client.chat.completions.with_raw_response.create(**options)  # type: ignore[call-overload]
    else:
        options["prompt"] = rng.integers(_FIRST_ID, 512, ask.prompt).tolist() if ask.kind == "ids" else text
        raw = await client.completions.with_raw_response.create(**options)  # type: ignore[call-overload]
    got.instance = raw.headers.get("x-simcluster-instance", "")
    got.fallback = raw.headers.get("x-simcluster-fallback", "")
    predicted = raw.headers.get("x-simcluster-predicted-ttft-ms")
    got.predicted_ttft_s = None if predicted is None else float(predicted) / 1e3
    async for chunk in raw.parse():
        now = time.monotonic_ns()
        if chunk.usage is not None:
            got.prompt_tokens, got.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        for choice in chunk.choices:
            if ask.kind != "chat" or choice.delta.role is None or choice.delta.content:
                got.first_ns, got.last_ns = got.first_ns or now, now
            got.finish = choice.finish_reason or got.finish


def write_client_times(folder: Path, gots: Sequence[Got]) -> None:
    """Put what the client saw of one server beside what the recorder wrote there."""
    rows = [[each.ask.engine_key, each.sent_ns, each.first_ns, each.last_ns] for each in gots]
    with (folder / "raw" / "client.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
