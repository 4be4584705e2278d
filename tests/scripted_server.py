"""An OpenAI-compatible server in a thread, whose answers a test scripts."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

__all__ = ["ScriptedServer", "completion", "scripted_server"]

Body = dict[str, Any]
Script = Callable[[Body], web.Response]


def completion(text: str | None, output_tokens: int = 7, prompt_tokens: int = 11, finish: str = "stop") -> web.Response:
    """Return a chat completion."""
    return web.json_response(
        {
            "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}],
            "usage": {"completion_tokens": output_tokens, "prompt_tokens": prompt_tokens},
        }
    )


class ScriptedServer:
    """Keeps every request body, and the most that were open at once."""

    def __init__(self, script: Script, hold_s: float) -> None:
        self.script = script
        self.bodies: list[Body] = []
        self.keys: list[str | None] = []
        self.url = ""
        self.most_open = 0
        self._open = 0
        self._hold_s = hold_s

    async def answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.text())
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        await asyncio.sleep(self._hold_s)
        self._open -= 1
        return self.script(body)


@contextmanager
def scripted_server(script: Script, hold_s: float = 0.0) -> Iterator[ScriptedServer]:
    """Serve `/v1/chat/completions` from a script while the block runs."""
    server = ScriptedServer(script, hold_s)
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
