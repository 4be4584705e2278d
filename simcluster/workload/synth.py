"""Synthetic traces from recipes."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from simcluster.errors import ConfigError
from simcluster.rng import Stream, generator
from simcluster.workload import servegen
from simcluster.workload.arrivals import (
    constant_arrivals_ns,
    gamma_arrivals_ns,
    mmpp2_arrivals_ns,
    poisson_arrivals_ns,
)
from simcluster.workload.lengths_file import read_length_pairs
from simcluster.workload.prompts import draw_prompts
from simcluster.workload.recipe import (
    Closed,
    Constant,
    DrawnLengths,
    FileLengths,
    Gamma,
    Lengths,
    Mmpp2,
    Poisson,
    Recipe,
    Replay,
    ServeGen,
    ServeGenLengths,
    Sessions,
    load_recipe,
)
from simcluster.workload.sessions import Turns, closed_loop, conversation_prompts, conversation_turns, prefix_columns
from simcluster.workload.slo import MS_PER_TOKEN, ttft_targets_s
from simcluster.workload.tasks import clipped_lengths, draw_mix
from simcluster.workload.trace import Trace
from simcluster.workload.trace_columns import FloatArray, IntArray, counted
from simcluster.workload.trace_file import read_trace

__all__ = ["load_recipe", "make_trace"]


@dataclass(slots=True)
class _Draft:
    """A trace in the making: n requests in the order of their draws.

    Attributes:
        starts_ns: arrivals [ns]: of the requests, or of first turns.
        turns: which requests belong together, or None.
        client: ServeGen client of each request, -1 for none, shape (n,).
        window_s: start of its window [s], shape (n,).
        notes: what the trace's source should say.
        inputs: SHA-256 of the files that were read, by name.
    """

    starts_ns: IntArray
    turns: Turns | None
    client: IntArray
    window_s: FloatArray
    notes: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.starts_ns) if self.turns is None else len(self.turns.session)


def make_trace(recipe: Recipe, replication: int = 0) -> Trace:
    """Draw a synthetic trace: arrivals, lengths or tasks, conversations, and TTFT targets of paper B.2.

    With tasks, output_tokens holds the lengths of the model `recipe.output_tokens_of`, and all models are in
    output_tokens_by_model. The trace's metadata holds the whole recipe.

    Args:
        recipe: what to draw.
        replication: replication of the recipe's seed.

    Raises:
        ConfigError: the arrivals go beyond the clock's range, or the recipe asks for more than there is.
        TraceError: a file that the recipe names cannot be read.
    """
    draft = _arrivals(recipe, replication)
    content = _content(recipe, draft, replication)
    if isinstance(recipe.lengths, ServeGenLengths):
        draft, content = _without_empty(draft, content)
    columns = _in_order(recipe, draft, content, replication)
    slope = MS_PER_TOKEN if recipe.slo_ms_per_token is None else recipe.slo_ms_per_token
    targets_s = ttft_targets_s(columns["prompt_tokens"], recipe.seed, replication, recipe.slo_scale, slope)
    source = f"synthetic, recipe {recipe.name}; {'; '.join(draft.notes) or 'no measured prompts, answers or scores'}"
    metadata = {
        "source": source,
        "licence": "Apache-2.0",
        "recipe": recipe.model_dump_json(exclude_none=True),
        "seed": str(recipe.seed),
        "replication": str(replication),
    }
    if draft.inputs:
        del metadata["licence"]  # that of the files holds
        metadata["recipe_inputs"] = "; ".join(f"{name} sha256 {digest}" for name, digest in draft.inputs.items())
    return Trace.from_columns(**columns, slo_ttft_ns=np.rint(targets_s * 1e9).astype(np.int64), metadata=metadata)


# ---- arrivals ------------------------------------------------------------------------------------


def _arrivals(recipe: Recipe, replication: int) -> _Draft:
    process, n = recipe.process, recipe.requests
    if isinstance(process, ServeGen):
        return _servegen_arrivals(recipe, process, replication)
    if isinstance(process, Closed):
        assert n is not None  # validated
        turns: Turns | None = closed_loop(process, n)
        return _draft(np.zeros(min(process.concurrency, n), dtype=np.int64), turns)
    inputs: dict[str, str] = {}
    if isinstance(process, Replay):
        recorded = _replayed_ns(recipe, process, inputs)
        n = n or len(recorded)
    assert n is not None  # validated: only the kinds above do without
    turns = None
    if recipe.sessions is not None:
        turns = conversation_turns(recipe.sessions, n, recipe.seed, replication)
    count = n if turns is None else int(turns.session[-1]) + 1
    if isinstance(process, Replay):
        if count > len(recorded):
            raise ConfigError(f"arrivals.file = {process.file!r}; has {len(recorded)} arrivals, {count} are needed")
        starts_ns = recorded[:count]
    else:
        starts_ns = _drawn_ns(process, count, recipe.seed, replication)
    draft = _draft(starts_ns, turns)
    draft.inputs |= inputs
    if isinstance(process, Replay):
        draft.notes.append(f"arrivals of {Path(process.file).name}")
    return draft


def _draft(starts_ns: IntArray, turns: Turns | None) -> _Draft:
    n = len(starts_ns) if turns is None else len(turns.session)
    return _Draft(starts_ns, turns, np.full(n, -1, dtype=np.int64), np.zeros(n))


def _drawn_ns(process: Poisson | Gamma | Constant | Mmpp2, n: int, seed: int, replication: int) -> IntArray:
    rng = generator(seed, Stream.ARRIVALS, replication)
    match process:
        case Poisson():
            return poisson_arrivals_ns(process.rate_rps, n, rng)
        case Gamma():
            return gamma_arrivals_ns(process.rate_rps, process.burstiness, n, rng)
        case Constant():
            return constant_arrivals_ns(process.rate_rps, n)
        case Mmpp2():
            states = generator(seed, Stream.STATES, replication)
            return mmpp2_arrivals_ns(
                process.rate_rps, process.ratio, process.high_share, process.correlation_s, n, rng, states
            )


def _replayed_ns(recipe: Recipe, process: Replay, inputs: dict[str, str]) -> IntArray:
    path = recipe.find(process.file)
    trace = read_trace(path)
    inputs[path.name] = trace.sha256 or ""
    scaled: IntArray = np.rint(trace.arrival_ns / process.rate_scale).astype(np.int64)
    return scaled


def _servegen_arrivals(recipe: Recipe, process: ServeGen, replication: int) -> _Draft:
    path = recipe.find(process.rates)
    start_s, end_s = process.window_s
    rng = generator(recipe.seed, Stream.ARRIVALS, replication)
    drawn = servegen.draw_arrivals(servegen.read_rates(path), (start_s, end_s), process.rate_scale, rng)
    arrivals, client, window = drawn
    if len(arrivals) == 0:
        raise ConfigError(f"arrivals.window_s = {process.window_s}; no client has requests there; choose another one")
    first = slice(recipe.requests)
    note = f"ServeGen rates of {path.name}, {start_s:g} to {end_s:g} s, times {process.rate_scale:g}"
    return _Draft(arrivals[first], None, client[first], window[first], [note], {path.name: _digest(path)})


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of all files of a folder by name."""
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for each in files:
        digest.update(each.read_bytes())
    return digest.hexdigest()


# ---- lengths and tasks ---------------------------------------------------------------------------


def _content(recipe: Recipe, draft: _Draft, replication: int) -> dict[str, Any]:
    """Draw what the requests are: new prompt tokens and answers, with tasks also what models make of them."""
    n, turns = len(draft), draft.turns
    match recipe.lengths:
        case DrawnLengths():
            return _drawn_lengths([recipe.lengths.prompt, recipe.lengths.answer], n, recipe.seed, replication)
        case FileLengths():
            return _file_lengths(recipe, recipe.lengths, draft, replication)
        case ServeGenLengths():
            return _servegen_lengths(recipe, recipe.lengths, draft, replication)
    mix = recipe.mix
    assert mix is not None  # validated: tasks or lengths
    owner = turns.session if turns is not None and recipe.sessions is not None else None
    drawn = draw_mix(mix, n, recipe.seed, replication, owner)
    texts = {}
    if recipe.prompts is not None:
        texts["prompt"] = draw_prompts(mix, drawn, generator(recipe.seed, Stream.PROMPT_TEXTS, replication))
    return {
        "prompt_tokens": drawn.prompt_tokens,
        "output_tokens": drawn.output_tokens[mix.output_tokens_of],
        "task": drawn.task,
        "task_names": drawn.task_names,
        "output_tokens_by_model": drawn.output_tokens,
        "quality_by_model": drawn.quality,
        "predicted_output_tokens_by_model": drawn.predicted_output_tokens,
        "predicted_quality_by_model": drawn.predicted_quality,
        **texts,
    }


def _drawn_lengths(rules: list[Lengths], n: int, seed: int, replication: int) -> dict[str, Any]:
    draws = generator(seed, Stream.LENGTHS, replication).standard_normal((n, 2))
    none = np.zeros(n, dtype=np.int32)
    prompts, answers = (clipped_lengths([rule], none, draws[:, k], 1.0) for k, rule in enumerate(rules))
    return {"prompt_tokens": prompts, "output_tokens": answers}


def _file_lengths(recipe: Recipe, lengths: FileLengths, draft: _Draft, replication: int) -> dict[str, Any]:
    path, n = recipe.find(lengths.file), len(draft)
    prompts, answers = read_length_pairs(path)
    draft.inputs[path.name] = _digest(path)
    draft.notes.append(f"lengths of {path.name}")
    if lengths.order == "file":
        if n > len(prompts):
            raise ConfigError(
                f"lengths.file = {lengths.file!r}; has {len(prompts)} pairs of lengths, {n} are needed; "
                "draw fewer requests, or use order: drawn"
            )
        rows = np.arange(n)
    else:
        rows = generator(recipe.seed, Stream.LENGTHS, replication).integers(len(prompts), size=n)
    return {"prompt_tokens": prompts[rows], "output_tokens": answers[rows]}


def _servegen_lengths(recipe: Recipe, lengths: ServeGenLengths, draft: _Draft, replication: int) -> dict[str, Any]:
    path = recipe.find(lengths.lengths)
    histograms = servegen.read_lengths(path)
    draft.inputs[path.name] = _digest(path)
    draft.notes.append(f"lengths of {path.name}, prompt and answer independent within a window")
    pool = lengths.without_lengths == "pool" or not isinstance(recipe.process, ServeGen)
    lacking = int(np.isin(draft.client, list(histograms), invert=True).sum())
    if lacking and isinstance(recipe.process, ServeGen):
        what = "draw theirs from all clients" if pool else "are left out"
        draft.notes.append(f"{counted(lacking, 'request')} of clients without lengths {what}")
    rng = generator(recipe.seed, Stream.LENGTHS, replication)
    prompts, answers = servegen.draw_lengths(histograms, draft.client, draft.window_s, pool, rng)
    return {"prompt_tokens": prompts, "output_tokens": answers}


def _without_empty(draft: _Draft, content: dict[str, Any]) -> tuple[_Draft, dict[str, Any]]:
    """Leave out requests of clients whose lengths are not known; such recipes have no conversations."""
    kept = content["prompt_tokens"] > 0
    if not kept.any():
        raise ConfigError("lengths: no client of this window has lengths; use without_lengths: pool")
    parts = {name: values[kept] for name, values in content.items()}
    rest = replace(draft, client=draft.client[kept], window_s=draft.window_s[kept])
    return replace(rest, starts_ns=draft.starts_ns[kept]) if draft.turns is None else draft, parts


# ---- putting together ----------------------------------------------------------------------------


def _in_order(recipe: Recipe, draft: _Draft, content: dict[str, Any], replication: int) -> dict[str, Any]:
    """Return the columns of the trace, by nominal arrival; later turns never come before earlier ones."""
    turns = draft.turns
    if turns is None:
        return {"arrival_ns": draft.starts_ns, **content}
    arrival_ns = turns.nominal_ns(draft.starts_ns)
    columns: dict[str, Any] = {"arrival_ns": arrival_ns, **content}
    is_closed = True
    label = "user"
    if recipe.sessions is not None:
        columns |= _conversation(recipe.sessions, turns, content, recipe.seed, replication)
        is_closed, label = recipe.sessions.mode == "closed", "session"
    names = np.array([f"{label}-{number}" for number in range(int(turns.session[-1]) + 1)], dtype=object)
    columns["session_id"] = names[turns.session]
    # Equal instants: first turns first, so that users take their turns in turn.
    order = np.lexsort((turns.session, turns.turn, arrival_ns))
    previous = turns.previous[order]
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    trace = Trace.from_columns(**columns).take(order)
    ordered = {name: getattr(trace, name) for name in columns}
    if is_closed:
        after = np.where(previous >= 0, position[previous], -1)
        ordered |= {"after": after, "think_ns": turns.think_ns[order]}
    return ordered


def _conversation(
    sessions: Sessions, turns: Turns, content: dict[str, Any], seed: int, replication: int
) -> dict[str, Any]:
    prompts = conversation_prompts(
        sessions.prefix_tokens, content["prompt_tokens"], content["output_tokens"], turns.turn
    )
    return {"prompt_tokens": prompts, **prefix_columns(sessions, turns, prompts, seed, replication)}
