"""Build the world of a run from a scenario: read its files, fill in defaults, draw what belongs to a request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from simcluster.card import Card, load_card
from simcluster.engine_options import resolve_engine_options
from simcluster.errors import ConfigError, TraceError
from simcluster.experiment.truth import fit_of, noise_in_words, true_model
from simcluster.instance import InstanceSpec, TrueModel, step_time_model
from simcluster.predict.beliefs import beliefs
from simcluster.predict.cost import expected_cost
from simcluster.request import FloatArray, IntArray, PrefixHashes, RequestColumns, RequestTruth
from simcluster.rng import Stream, generator
from simcluster.scenario import Instance, Scenario, Slo, Workload
from simcluster.shipped import find_file
from simcluster.units import PS_PER_NS
from simcluster.workload import DEFAULT_QUALITY, Trace, read_trace, ttft_targets_s
from simcluster.workload.recipe import Arrivals, Mmpp2, Poisson, Recipe
from simcluster.workload.synth import load_recipe, make_trace
from simcluster.world import World

__all__ = ["build_world"]

_LONGEST_NS = 4_000_000_000_000_000  # 46 days; the clock ends at 53


def build_world(scenario: Scenario, path: Path, on_predicted: Callable[[int, int], None] | None = None) -> World:
    """Read what a scenario names and draw everything that belongs to a request.

    Args:
        scenario: the scenario.
        path: where it was read; relative file names are looked up beside it.
        on_predicted: told how many requests a predictor is done with, and of how many; a prompt takes it some 0.2 ms.

    Raises:
        ConfigError: an instance or option is wrong.
        CardError: a card cannot be read.
        TraceError: the trace cannot be read.
    """
    notes: list[str] = list(scenario.assumptions)
    warnings: list[str] = []
    instances, models, cards = _build_instances(scenario, path, notes, warnings)
    trace, inputs = _load_trace(scenario.workload, scenario.seed, path)
    if "source" in trace.metadata:
        notes.append(f"the trace says: {trace.metadata['source']}")
    for spec in instances:  # without shared prefixes block identities never matter, and counts are kept instead
        spec.engine.shared_prefixes = trace.prefix_offsets is not None
    _check_closed_loop(scenario, path, trace)
    known, truth = _build_requests(scenario, path, trace, instances, notes, inputs, on_predicted)
    inputs["cards"] = {card.name: card.source_sha256 for card in cards}
    return World(
        instances=tuple(instances),
        true_models=tuple(models),
        num_gpus=tuple(card.num_gpus for card in cards),
        coverages=tuple(card.coverage for card in cards),
        request_id=trace.request_id,
        task=trace.task_labels(),
        known=known,
        truth=truth,
        after=trace.after,
        think_ps=None if trace.think_ns is None else trace.think_ns * PS_PER_NS,
        cost_weight=scenario.routing.cost_weight,
        assumptions=tuple(dict.fromkeys(notes)),
        warnings=tuple(dict.fromkeys(warnings)),
        notes=trace.notes,
        inputs=inputs,
    )


def _check_closed_loop(scenario: Scenario, path: Path, trace: Trace) -> None:
    """Refuse a view that would have to be captured before it is known when a request arrives."""
    routing = scenario.routing
    if trace.after is not None and routing.publish_delay_s > 0 and routing.refresh_interval_s == 0:
        raise ConfigError(
            f"{path}: routing.publish_delay_s = {routing.publish_delay_s:g}; must be 0, or refresh_interval_s above 0, "
            "with a trace whose requests wait for others"
        )


def _build_instances(
    scenario: Scenario, path: Path, notes: list[str], warnings: list[str]
) -> tuple[list[InstanceSpec], list[TrueModel], list[Card]]:
    seed = int(generator(scenario.seed, Stream.STEP_NOISE).integers(2**63))
    specs: list[InstanceSpec] = []
    models: list[TrueModel] = []
    cards: list[Card] = []
    items: list[Instance] = []
    for number, item in enumerate(scenario.cluster.instances):
        where = f"{path}: cluster.instances[{number}]"
        card = load_card(find_file(item.card, "calibration", ".json", path.parent, f"{where}.card"))
        engine, found = resolve_engine_options(item.engine, card, f"{where}.engine")
        warnings.extend(found)
        believed = fit_of(card, item.believed_model.fit, f"{where}.believed_model.fit")
        for replica in range(item.replicas):
            name = item.name or card.name
            spec = InstanceSpec(
                index=len(specs),
                name=name if item.replicas == 1 else f"{name}-{replica + 1}",
                model=card.model,
                card=card.name,
                price_in=item.price.input_usd_per_mtok,
                price_out=item.price.output_usd_per_mtok,
                engine=engine,
                believed=step_time_model(believed, card.host_time_s, item.believed_model.scale),
                front_end=card.front_end,
                service_rates=card.service_rates,
                badge=card.badge,
            )
            specs.append(spec)
            models.append(true_model(item.true_model, card, seed, spec.index, f"{where}.true_model"))
            cards.append(card)
            items.append(item)
    notes.extend(_card_notes(cards, items))
    _check_names(specs, path)
    return specs, models, cards


def _card_notes(cards: list[Card], items: list[Instance]) -> list[str]:
    """Say once what holds for several cards."""
    lines: dict[str, list[str]] = {}
    for card, item in zip(cards, items, strict=True):
        truth = item.true_model
        noise = noise_in_words(truth, card)
        assumed = ", ".join(sorted({a.field.split(".")[0] for a in card.assumptions}))
        for text in (
            card.badge,
            f"step times {card.provenance} ({card.device})",
            f"true steps follow the {truth.fit or card.chosen_fit} fit with {noise}, "
            f"routers believe the {item.believed_model.fit} fit",
            f"assumed in the card (see it for why): {assumed}" if assumed else "",
        ):
            lines.setdefault(text, []).append(card.model)
    return [f"{', '.join(dict.fromkeys(m))}: {text}" for text, m in lines.items() if text]


def _check_names(specs: list[InstanceSpec], path: Path) -> None:
    seen: dict[str, int] = {}
    for spec in specs:
        if spec.name in seen:
            raise ConfigError(
                f"{path}: cluster.instances: the name {spec.name!r} is used twice; names must differ; "
                "give each entry a name"
            )
        seen[spec.name] = spec.index


def _load_trace(workload: Workload, seed: int, path: Path) -> tuple[Trace, dict[str, Any]]:
    if workload.trace is not None:
        source = find_file(workload.trace, "traces", ".parquet", path.parent, f"{path}: workload.trace")
        trace = read_trace(source)
        inputs = {"trace": source.name, "trace_sha256": trace.sha256}
    else:
        assert workload.recipe is not None  # validated: one of the two is given
        source = find_file(workload.recipe, "traces/recipes", ".yaml", path.parent, f"{path}: workload.recipe")
        trace = make_trace(_recipe_of(workload, source).model_copy(update={"seed": seed}))
        inputs = {"recipe": source.name}
    if workload.limit is not None:
        trace = trace.head(workload.limit)
    last = float(trace.arrival_ns[-1]) / workload.rate_scale
    if last > _LONGEST_NS:
        raise TraceError(
            f"{source}: the last request arrives after {last / 8.64e13:.1f} days; the simulated clock holds 46; "
            "take a part of the trace (limit) or raise rate_scale"
        )
    if workload.rate_scale != 1:
        trace = trace.with_arrivals(np.rint(trace.arrival_ns / workload.rate_scale).astype(np.int64))
    return trace, inputs


def _recipe_of(workload: Workload, source: Path) -> Recipe:
    """Read a recipe; the scenario's rate and burstiness replace its arrivals."""
    recipe = load_recipe(source)
    if workload.rate_rps is None:
        return recipe
    if workload.burst_ratio == 1:
        process: Arrivals = Poisson(kind="poisson", rate_rps=workload.rate_rps)
    else:
        process = Mmpp2(kind="mmpp2", rate_rps=workload.rate_rps, ratio=workload.burst_ratio)
    if recipe.requests is None:
        raise ConfigError(f"{source}: requests is missing; workload.rate_rps needs it; add the number of requests")
    return recipe.model_copy(update={"rate_rps": None, "arrivals": process})


def _build_requests(
    scenario: Scenario,
    path: Path,
    trace: Trace,
    instances: list[InstanceSpec],
    notes: list[str],
    inputs: dict[str, Any],
    on_predicted: Callable[[int, int], None] | None,
) -> tuple[RequestColumns, RequestTruth]:
    entries = [(number, item) for number, item in enumerate(scenario.cluster.instances) for _ in range(item.replicas)]
    first, group_of_instance = _groups(instances, [item for _, item in entries])
    group_specs = [instances[j] for j in first]
    models = [spec.model for spec in group_specs]
    prompt: IntArray = np.stack([trace.prompt_tokens_by_model.get(m, trace.prompt_tokens) for m in models], axis=1)
    by_model = trace.output_tokens_by_model
    missing = sorted({m for m in models if m not in by_model})
    if missing:
        notes.append(f"the trace has no answer lengths for {', '.join(missing)}: its output_tokens holds for them")
    output: IntArray = np.stack([by_model.get(m, trace.output_tokens) for m in models], axis=1)
    quality = _quality(path, trace, models, [entries[j] for j in first], notes)
    lengths, expected_quality = beliefs(scenario, path, trace, models, output, quality, notes, inputs, on_predicted)
    known = _known(scenario, trace, group_specs, group_of_instance, prompt, lengths, expected_quality, notes)
    truth = RequestTruth(
        output_tokens=output,
        quality=quality,
        ends_by_length=trace.ends_by_length,
        cancel_after_ps=np.where(trace.cancel_ns >= 0, trace.cancel_ns * PS_PER_NS, -1),
    )
    return known, truth


def _groups(instances: list[InstanceSpec], items: list[Instance]) -> tuple[list[int], IntArray]:
    """Group instances at which a request is the same: (first of each group, group of each instance (j,))."""
    keys = [
        (spec.model, spec.price_in, spec.price_out, item.quality) for spec, item in zip(instances, items, strict=True)
    ]
    number = {key: group for group, key in enumerate(dict.fromkeys(keys))}
    return [keys.index(key) for key in number], np.array([number[key] for key in keys], dtype=np.int64)


def _quality(
    path: Path, trace: Trace, models: list[str], entries: list[tuple[int, Instance]], notes: list[str]
) -> FloatArray:
    """Return the true quality of each answer, (n, m): the trace's, else the instance's, else the model's mean.

    Raises:
        ConfigError: none of these is known.
    """
    columns, fixed = [], []
    for model, (number, item) in zip(models, entries, strict=True):
        if model in trace.quality_by_model:
            columns.append(trace.quality_by_model[model])
            continue
        value = item.quality
        if value is None and not trace.quality_by_model:
            value = DEFAULT_QUALITY.get(model)
        if value is None:
            known = ", ".join(trace.quality_by_model) or "no model"
            raise ConfigError(
                f"{path}: cluster.instances[{number}].quality is missing; the trace has quality for {known}, "
                f"not for {model}; add quality: a number from 0 to 1"
            )
        columns.append(np.full(len(trace), value))
        fixed.append(f"{model} {value:g}")
    if fixed:
        notes.append(f"the trace has no quality, every answer gets: {', '.join(dict.fromkeys(fixed))}")
    return np.stack(columns, axis=1)


def _known(
    scenario: Scenario,
    trace: Trace,
    groups: list[InstanceSpec],
    group_of_instance: IntArray,
    prompt: IntArray,
    lengths: FloatArray,
    expected_quality: FloatArray,
    notes: list[str],
) -> RequestColumns:
    """Put together what routers believe; answers are expected to end at the client's limit at the latest."""
    expected = np.maximum(np.rint(lengths), 1).astype(np.int64)
    limit = trace.max_tokens[:, None]
    expected = np.where(limit > 0, np.minimum(expected, np.maximum(limit, 1)), expected)
    cost = expected_cost(prompt, expected, [(spec.price_in, spec.price_out) for spec in groups])
    return RequestColumns(
        group_of_instance=group_of_instance,
        arrival_ps=trace.arrival_ns * PS_PER_NS,
        prompt_tokens=np.ascontiguousarray(prompt),
        max_tokens=trace.max_tokens,
        priority=trace.priority,
        slo_ttft_ps=_targets_ps(scenario.slo, trace, scenario.seed, notes),
        predicted_output_tokens=np.ascontiguousarray(expected),
        predicted_quality=expected_quality,
        predicted_utility=expected_quality - scenario.routing.cost_weight * cost,
        prefix=_prefix_hashes(trace),
        session_id=trace.session_id,
    )


def _prefix_hashes(trace: Trace) -> PrefixHashes | None:
    if trace.prefix_offsets is None or trace.prefix_values is None or trace.prefix_block_size is None:
        return None
    _, dense = np.unique(trace.prefix_values, return_inverse=True)
    return PrefixHashes(trace.prefix_offsets, dense.astype(np.int64), trace.prefix_block_size)


def _targets_ps(slo: Slo, trace: Trace, seed: int, notes: list[str]) -> IntArray:
    """Return the TTFT target of each request [ps], -1 without one."""
    rule = slo.ttft
    if rule is None:
        rule = "trace" if (trace.slo_ttft_ns >= 0).any() else "paper"
        if rule == "paper":
            notes.append("the trace has no TTFT targets: they are drawn by the paper's rule B.2")
    if rule == "none":
        return np.full(len(trace), -1, dtype=np.int64)
    if rule == "trace":
        seconds = np.where(trace.slo_ttft_ns >= 0, trace.slo_ttft_ns / 1e9, np.nan) * slo.ttft_scale
    elif rule == "paper":
        seconds = ttft_targets_s(trace.prompt_tokens, seed, scale=slo.ttft_scale)
    else:
        seconds = np.full(len(trace), float(rule) * slo.ttft_scale)
    seconds = np.minimum(seconds, _LONGEST_NS / 1e9)  # no run is longer
    targets = np.rint(np.where(np.isnan(seconds), -1e-9, seconds) * 1e9).astype(np.int64)
    return np.where(targets >= 0, targets * PS_PER_NS, -1)
