"""Errors of the OpenAI-compatible API as HTTP answers."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from simcluster.live.openai_api import ApiError, error_body

__all__ = ["answer_errors"]


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer with an error body as vLLM writes it."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error_body(error), status=error.status, headers=error.headers)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return web.json_response(error_body(ApiError(error.status, error.reason)), status=error.status)
    except ConnectionError as error:  # the client has left while something was written to it
        raise asyncio.CancelledError from error
