"""The least that an aiohttp proxy can do: what the router's CPU time is seen beside, since machines differ.

Run as a program with the address of a server it prints its port and serves until its standard input closes.
"""

import asyncio
import sys

import aiohttp
from aiohttp import web

__all__: list[str] = []


async def _main(url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            headers = {"Content-Type": "application/json"}
            async with session.post(url + request.path, data=await request.read(), headers=headers) as answer:
                response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        app = web.Application()
        app.router.add_post("/v1/completions", pass_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        sys.stdout.write(f"{runner.addresses[0][1]}\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
