"""A simulated instance: the truth about requests meets the engine here, and nowhere else."""

from dataclasses import replace

import numpy as np

from simcluster import _native
from simcluster.backends.base import Engine, EngineFactory
from simcluster.instance import InstanceSpec
from simcluster.request import Request, RequestColumns
from simcluster.world import World

__all__ = ["SimulatedInstance", "oracle_columns"]

_OWN_TOKENS_BIT = 36  # token ids of shared prefixes stay below 2**36, those of one request's own prompt above


def oracle_columns(world: World) -> RequestColumns:
    """Return the requests as the oracle sees them: true answer lengths, and utility at their true cost."""
    price_out = np.empty(world.truth.output_tokens.shape[1])
    price_out[world.known.group_of_instance] = [spec.price_out for spec in world.instances]
    surplus = world.truth.output_tokens - world.known.predicted_output_tokens
    return replace(
        world.known,
        predicted_output_tokens=world.truth.output_tokens,
        predicted_utility=world.known.predicted_utility - world.cost_weight * surplus * price_out,
    )


class SimulatedInstance:
    """One simulated instance behind the router."""

    def __init__(self, world: World, index: int, build_engine: EngineFactory = _native.Engine) -> None:
        self.spec: InstanceSpec = world.instances[index]
        self._truth = world.truth
        self._group = int(world.known.group_of_instance[index])
        caching = self.spec.engine.enable_prefix_caching and world.known.prefix is not None
        self._hash_block = world.known.prefix.block_size if caching and world.known.prefix else 0
        model = world.true_models[index]
        self.engine: Engine = build_engine(self.spec.engine, model.step_time, model.noise)

    def submit(self, request: Request, sent_ps: int) -> None:
        """Send a request that leaves the router at an instant [ps]; the true end goes to the engine alone."""
        index, truth = request.index, self._truth
        prompt_tokens = int(request.prompt_tokens[self.spec.index])
        accepted = self.engine.submit(
            index,
            prompt_tokens,
            int(truth.output_tokens[index, self._group]),
            self.spec.engine_arrival_ps(sent_ps, prompt_tokens),
            request.max_tokens,
            bool(truth.ends_by_length[index]),
            request.priority,
            request.arrival_ps,
            self._prompt_runs(request, prompt_tokens),
        )
        cancel_after = int(truth.cancel_after_ps[index])
        if accepted and cancel_after >= 0:
            self.engine.cancel(index, max(request.arrival_ps + cancel_after, self.engine.now))

    def _prompt_runs(self, request: Request, prompt_tokens: int) -> list[tuple[int, int]]:
        """Spell a prompt out as runs of token ids: equal hashes give equal tokens, the rest is the request's own."""
        if request.prefix_hashes is None or self._hash_block == 0:
            return []
        runs, left = [], prompt_tokens
        for value in request.prefix_hashes.tolist():
            count = min(self._hash_block, left)
            if count > 0:
                runs.append((value * self._hash_block, count))
                left -= count
        if left > 0:
            runs.append(((request.index + 1) << _OWN_TOKENS_BIT, left))
        return runs

    def snapshot(self) -> _native.Snapshot:
        """Return the state at the newest step boundary."""
        return self.engine.snapshot()
