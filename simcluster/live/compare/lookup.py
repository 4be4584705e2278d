"""Requests of a trace at a live router: what policies may know of them, and, apart from that, how long answers are."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from simcluster.live.client.prompts import prompt_ids
from simcluster.live.mock.transit import REACH, with_fields
from simcluster.live.openai_api import ApiError, Asked
from simcluster.request import Request
from simcluster.world import World

__all__ = ["TraceAnswers", "TraceRequests"]


class TraceRequests:
    """Looks requests up in a world by their id; policies see what they see in simulation, and nothing of the truth.

    Attributes:
        index_of: number in the world, by what stands for the request at the router.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._by_id = {str(name): index for index, name in enumerate(world.request_id)}
        self.index_of: dict[int, int] = {}

    async def build(
        self,
        number: int,
        asked: Asked,  # noqa: ARG002  (the trace says what is asked)
        headers: Mapping[str, str],  # noqa: ARG002
        request_id: str,
        now_ps: Callable[[], int],
    ) -> Request:
        """Return a request.

        Raises:
            ApiError: 400, it is not in the trace.
        """
        index = self._by_id.get(request_id)
        if index is None:
            raise ApiError(400, f"X-Request-Id: {request_id[:60]!r} is not in the trace")
        self.index_of[number] = index
        value = self._world.known.value
        return Request(
            index=number,
            arrival_ps=now_ps(),
            prompt_tokens=value("prompt_tokens", index),
            max_tokens=value("max_tokens", index),
            priority=value("priority", index),
            slo_ttft_ps=value("slo_ttft_ps", index),
            predicted_output_tokens=value("predicted_output_tokens", index),
            predicted_utility=value("predicted_utility", index),
            prefix_hashes=value("prefix_hashes", index),
            session_id=value("session_id", index),
            prefix_block_size=value("prefix_block_size", index),
            predicted_quality=value("predicted_quality", index),
        )


class TraceAnswers:
    """Completes a request's body for the instance that was chosen, after the decision.

    Mock servers look the answer's length up themselves; they get the client's limit, or what the context leaves, and
    when the request is to reach their engine. Real ones are made to answer at the length that the trace has for their
    model, by max_tokens and ignore_eos.

    Attributes:
        reach_ns: when requests are to reach an engine by CLOCK_MONOTONIC [ns], by number; what is not there, at once.
    """

    def __init__(self, world: World, requests: TraceRequests, *, mock: bool) -> None:
        self._world, self._requests, self._mock = world, requests, mock
        self.reach_ns: dict[int, int] = {}

    def __call__(self, body: bytes, request: Request, instance: int) -> bytes:
        """Return the body for an instance."""
        world, index = self._world, self._requests.index_of[request.index]
        prompt = int(request.prompt_tokens[instance])
        room = world.instances[instance].engine.max_model_len - prompt
        fields: dict[str, Any] = {"max_tokens": request.max_tokens if request.max_tokens > 0 else max(room, 1)}
        if prompt != int(world.known.prompt_tokens[index, 0]):  # its tokenizer counts otherwise
            fields["prompt"] = prompt_ids(world, index, prompt)
        if self._mock:
            # Put behind the others, since a long prompt takes a while to be read and written anew.
            if index in self.reach_ns:
                fields[REACH] = self.reach_ns[index]
            return with_fields(body, fields)
        true_length = int(world.truth.output_tokens[index, world.known.group_of_instance[instance]])
        fields |= {"max_tokens": max(min(fields["max_tokens"], true_length), 1), "ignore_eos": True}
        return json.dumps(json.loads(body) | fields, separators=(",", ":")).encode()
