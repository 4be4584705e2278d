"""Simulated instances: the truth about requests meets the engines here, and nowhere else."""

from dataclasses import replace

import numpy as np

from simcluster import _native
from simcluster.backends.base import EngineFactory
from simcluster.request import RequestColumns
from simcluster.world import World

__all__ = ["build_cluster", "oracle_columns"]


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


def build_cluster(
    world: World, known: RequestColumns, build_engine: EngineFactory, watch: _native.Watch, *, oracle: bool
) -> _native.Cluster:
    """Build the engines of a run behind one interface; the true ends go to them alone.

    Args:
        world: what is fixed beforehand.
        known: the requests as the routers of the run see them.
        build_engine: the native engine, or one that takes its place.
        watch: what the run wants to be told of.
        oracle: routers know the true ends.
    """
    prefix, truth = known.prefix, world.truth
    cluster = _native.Cluster(
        prompt_tokens=known.prompt_tokens,
        output_tokens=truth.output_tokens,
        predicted_output=known.predicted_output_tokens,
        max_tokens=known.max_tokens,
        priority=known.priority,
        cancel_after=truth.cancel_after_ps,
        ends_by_length=truth.ends_by_length,
        prefix=None if prefix is None else (prefix.offsets, prefix.values, prefix.block_size),
        routers_know_ends=oracle,
        in_order=world.after is None,
        watch=watch,
    )
    for spec, model in zip(world.instances, world.true_models, strict=True):
        cluster.add_instance(
            engine=build_engine(spec.engine, model.step_time, model.noise),
            group=int(known.group_of_instance[spec.index]),
            request_s=spec.front_end.request_s,
            per_prompt_token_s=spec.front_end.per_prompt_token_s,
            output_hop=spec.output_hop_ps,
            shares_prefixes=spec.engine.enable_prefix_caching and prefix is not None,
            asynchronous=spec.engine.async_scheduling,
        )
    return cluster
