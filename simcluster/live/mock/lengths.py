"""What a mock server knows of requests: as the trace has it for a known request id, else by a rule that is stated."""

from dataclasses import dataclass

from simcluster.live.openai_api import Asked
from simcluster.world import World

__all__ = ["Answer", "Lengths"]

_OWN_TOKENS_BIT = 36  # ids of shared tokens stay below 2**36, as in the simulated cluster


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine is told about an answer.

    Attributes:
        output_tokens: it ends by itself after so many.
        max_tokens: its limit; -1 for the context's.
        ends_by_length: it ends by its limit alone.
    """

    output_tokens: int
    max_tokens: int
    ends_by_length: bool


class Lengths:
    """Looks up answers of one instance.

    A request id of the trace has the trace's length and ending. Any other ends at `max_tokens` if the client gives
    one, else at the mean length of the instance's answers in the trace.
    """

    def __init__(self, world: World, instance: int) -> None:
        """Look into the truth of a world, for one instance."""
        group = int(world.known.group_of_instance[instance])
        self._output = world.truth.output_tokens[:, group]
        self._by_length = world.truth.ends_by_length
        self._index = {str(name): number for number, name in enumerate(world.request_id)}
        self._prefix = world.known.prefix if world.instances[instance].engine.shared_prefixes else None
        self._mean = max(1, round(float(self._output.mean()))) if len(self._output) else 1

    def of(self, request_id: str | None, asked: Asked) -> Answer:
        """Return how a request's answer ends.

        Args:
            request_id: the client's id, or None.
            asked: the request.
        """
        limit = -1 if asked.max_tokens is None else asked.max_tokens
        if asked.ignore_eos and asked.max_tokens is not None:
            return Answer(asked.max_tokens, asked.max_tokens, ends_by_length=True)
        number = None if request_id is None else self._index.get(request_id)
        if number is not None:
            output = int(self._output[number])
            if self._by_length[number]:
                return Answer(output, output if limit < 0 else min(limit, output), ends_by_length=True)
            return Answer(output, limit, ends_by_length=False)
        if asked.max_tokens is not None:
            return Answer(asked.max_tokens, asked.max_tokens, ends_by_length=True)
        return Answer(self._mean, -1, ends_by_length=False)

    def prompt_runs(self, request_id: str | None, prompt_tokens: int) -> list[tuple[int, int]]:
        """Return a prompt as runs of token ids (first, count) that share what the trace says is shared.

        Nothing stands for a prompt that shares nothing.
        """
        number = None if request_id is None else self._index.get(request_id)
        if self._prefix is None or number is None:
            return []
        block, left, runs = self._prefix.block_size, prompt_tokens, []
        for value in self._prefix.of(number).tolist():
            if left > 0:
                runs.append((value * block, min(block, left)))
                left -= runs[-1][1]
        return [*runs, ((number + 1) << _OWN_TOKENS_BIT, left)] if left > 0 else runs
