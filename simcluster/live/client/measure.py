"""From what became of requests at the client to the rows of a run directory, and to what is said about measuring."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl

from simcluster.backends.ledger import NEVER, STATUSES, RequestRows
from simcluster.live.client.answer import clean_gaps
from simcluster.live.client.send import Outcome
from simcluster.report.metrics import percentiles
from simcluster.request import IntArray
from simcluster.units import PS_PER_S
from simcluster.world import World

__all__ = ["measuring_report", "request_rows"]

_BACKWARDS = "clock_went_back"


def request_rows(outcomes: Sequence[Outcome], instance_of: Callable[[int], int]) -> RequestRows:
    """Return what became of requests, by the instants of their sending.

    One whose first token came before it was sent is a failed one: its times cannot be true.

    Args:
        outcomes: of the requests.
        instance_of: where each went, by its number; -1: nowhere.
    """
    ordered = sorted(outcomes, key=lambda each: (each.sent_ps, each.index))
    wrong = [each.ttft_s is not None and each.ttft_s < 0 for each in ordered]
    reasons = [_BACKWARDS if bad else each.reason for each, bad in zip(ordered, wrong, strict=True)]
    names = tuple(dict.fromkeys(("", *reasons)))
    statuses = ["failed" if bad else each.status for each, bad in zip(ordered, wrong, strict=True)]
    first = [None if bad else each.answer.first_token_ps for each, bad in zip(ordered, wrong, strict=True)]
    never = np.full(len(ordered), NEVER, dtype=np.int64)
    nothing = np.zeros(len(ordered), dtype=np.int64)
    return RequestRows(
        request=_ints([each.index for each in ordered]),
        arrival_ps=_ints([each.sent_ps for each in ordered]),
        instance=_ints([instance_of(each.index) for each in ordered]),
        scheduled_ps=never,
        first_token_ps=_ints(first),
        end_ps=_ints([each.end_ps for each in ordered]),
        output_tokens=_ints([each.output_tokens for each in ordered]),
        cached_tokens=nothing,
        preemptions=nothing,
        status=_ints([STATUSES.index(each) for each in statuses]),
        reason=_ints([names.index(each) for each in reasons]),
        prompt_tokens=_ints([each.prompt_tokens for each in ordered]),
        reasons=names,
    )


def _ints(values: Sequence[int | None]) -> IntArray:
    return np.array([NEVER if each is None else each for each in values], dtype=np.int64)


def measuring_report(
    world: World, outcomes: Sequence[Outcome], lag_ps: Sequence[int], instance_of: Callable[[int], int]
) -> dict[str, Any]:
    """Return what is to be known about times and counts of a client, as plain data.

    * `token_source`, `prompt_token_source`: how many requests whose tokens the server, the chunks or the trace count;
    * `token_mismatches`, `prompt_token_mismatches`: finished requests whose counts are not those of the trace;
    * `chunk_gap_s`: times between chunks, each of which may hold several tokens, with `itl_dropped` negative ones left
      out; `token_gap_s`: time per token after the first, by the count of tokens;
    * `schedule_lag_s`: how late requests were sent; `max` is the worst;
    * `negative_ttft`: requests that were rejected since their first token came before they were sent.
    """
    finished = [each for each in outcomes if each.status == "finished"]
    gaps, dropped = clean_gaps([gap for each in outcomes for gap in each.answer.chunk_gaps_s()])
    lag_s = pl.Series([each / PS_PER_S for each in lag_ps], dtype=pl.Float64)
    placed = [(each, instance) for each in finished if (instance := instance_of(each.index)) >= 0]
    lengths = [(each.output_tokens, _answer_tokens(world, each.index, instance)) for each, instance in placed]
    group, prompts_of = world.known.group_of_instance, world.known.prompt_tokens
    prompts = [(each.prompt_tokens, int(prompts_of[each.index, group[instance]])) for each, instance in placed]
    return {
        "token_source": dict(Counter(each.token_source for each in outcomes)),
        "prompt_token_source": dict(Counter(each.prompt_token_source for each in outcomes)),
        "token_mismatches": sum(counted != expected for counted, expected in lengths),
        "prompt_token_mismatches": sum(counted != expected for counted, expected in prompts),
        "chunk_gap_s": {**percentiles(pl.Series(gaps, dtype=pl.Float64)), "itl_dropped": dropped},
        "token_gap_s": percentiles(
            pl.Series([each.answer.tpot_s for each in finished], dtype=pl.Float64),
        ),
        "schedule_lag_s": {**percentiles(lag_s), "max": None if lag_s.is_empty() else float(lag_s.max())},  # type: ignore[arg-type]
        "negative_ttft": sum(each.ttft_s is not None and each.ttft_s < 0 for each in outcomes),
    }


def _answer_tokens(world: World, index: int, instance: int) -> int:
    """Return the length that an answer has by the trace, the client's limit and the context [tokens]."""
    group = world.known.group_of_instance[instance]
    room = world.instances[instance].engine.max_model_len - int(world.known.prompt_tokens[index, group])
    limit = int(world.known.max_tokens[index])
    return min(int(world.truth.output_tokens[index, group]), room, limit if limit > 0 else room)
