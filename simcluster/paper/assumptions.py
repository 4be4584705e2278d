"""Which assumption moves the results: the paper's headline under other prices, lengths, targets, hardware, beliefs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from simcluster.paper.figure import Claim, Figure, Plot
from simcluster.paper.lab import Ask, Fields, Lab
from simcluster.paper.routing import BASELINES, RATES_RPS, headline
from simcluster.shipped import find_file
from simcluster.workload.recipe import load_recipe

__all__ = ["figure_assumptions", "write_recipe"]

_KV_BLOCKS = (37_501, 23_001, 15_626)


@dataclass(frozen=True, slots=True)
class _Variant:
    """One other reading of what the paper leaves open."""

    name: str
    scenario: str = "paper"
    fields: Mapping[str, Any] = field(default_factory=dict)
    recipe: Callable[[dict[str, Any]], None] | None = None
    quick: bool = False


def _set(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of a recipe."""

    def change(data: dict[str, Any]) -> None:
        for name in path[:-1]:
            data = data[name]
        data[path[-1]] = value

    return change


def _flat_quality(data: dict[str, Any]) -> None:
    """Halve the distance of every mean quality from the task's mean over the models."""
    for task in data["tasks"].values():
        middle = sum(task["quality"].values()) / len(task["quality"])
        task["quality"] = {model: (value + middle) / 2 for model, value in task["quality"].items()}


_EVERY = "cluster.instances[*]."
_VARIANTS = (
    _Variant("scenario paper", quick=True),
    _Variant("paper-literal: lambda 5e-4, international prices", "paper-literal", quick=True),
    _Variant("paper-cn: lambda 5e-4, mainland prices", "paper-cn", quick=True),
    _Variant("answers as the medians say (outscale 1)", recipe=_set("outscale", value=1.0), quick=True),
    _Variant("answers twice the medians (outscale 2)", recipe=_set("outscale", value=2.0)),
    _Variant("one request in ten a report, not one in four", recipe=_set("tasks", "govreport", "weight", value=1 / 12)),
    _Variant("reports of 4,000 tokens, not 7,000", recipe=_set("tasks", "govreport", "prompt", "median", value=4000.0)),
    _Variant("models differ half as much in quality", recipe=_flat_quality),
    _Variant("targets with a slope of 0.0965 ms per token", recipe=_set("slo_ms_per_token", value=0.0965), quick=True),
    _Variant("paper-loose: targets times 2", "paper-loose"),
    _Variant(
        "steps 1.7 times as long (a slower GPU)",
        fields={f"{_EVERY}true_model.scale": 1.7, f"{_EVERY}believed_model.scale": 1.7},
    ),
    _Variant("paper-2048: at most 2048 tokens per step", "paper-2048"),
    _Variant("synchronous scheduling", fields={f"{_EVERY}engine.async_scheduling": False}),
    _Variant(
        "KV caches ten times as large",
        fields={
            f"cluster.instances[{j}].engine.num_gpu_blocks_override": 10 * blocks for j, blocks in enumerate(_KV_BLOCKS)
        },
    ),
    _Variant(
        "routers know the true step times, no noise",
        fields={f"{_EVERY}believed_model.fit": "hinge", f"{_EVERY}true_model.noise": None},
    ),
    _Variant(
        "routers know the true quality",
        recipe=_set("predictions", "quality", value={"known_shared": 1.0, "known_own": 1.0, "noise": 0.0}),
    ),
)


def write_recipe(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> str:
    """Write the recipe `paper` with a change and return its path."""
    source = find_file("paper", "traces/recipes", ".yaml")
    data = load_recipe(source).model_dump(exclude_none=True)
    change(data)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**data, "name": name}, sort_keys=False), encoding="utf-8")
    return str(path.absolute())


def _fields(lab: Lab, number: int, variant: _Variant) -> Fields:
    if variant.recipe is None:
        return variant.fields
    return {**variant.fields, "workload.recipe": write_recipe(lab.folder, f"variant-{number}", variant.recipe)}


def figure_assumptions(lab: Lab) -> Figure:
    """Return the claims of figure 5 under other assumptions."""
    chosen = [(k, each) for k, each in enumerate(_VARIANTS) if lab.sizes.dense or each.quick]
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    asks = []
    for number, variant in chosen:
        fields = _fields(lab, number, variant)
        settings = [{**fields, "workload.rate_rps": rate} for rate in RATES_RPS]
        asks.append(Ask(variant.scenario, (*BASELINES, "sfs"), settings))
    for (_, variant), groups in zip(chosen, lab.measure(asks), strict=True):
        found = headline(groups, RATES_RPS)
        rows.append(
            {
                "assumption": variant.name,
                **_columns("area_gain", found[0]),
                **_columns("gain_at_5", found[1]),
                **_columns("gain_at_8", found[2]),
                "area_over": found[0].what.rpartition(" ")[2],
                "share_negative_utility": float(groups[2]["sfs"].of("share_negative_utility").mean()),
            }
        )
        claims.append(Claim(f"area gain, {variant.name}", "+33 %", found[0].ours, found[0].interval, "%", is_main=True))
    return Figure(
        key="assumptions",
        title="Gain of SFS over the best baseline under other assumptions (percent)",
        table=pl.DataFrame(rows),
        claims=claims,
        moved_by=_in_words(rows),
        moved_by_short="see the other rows",
        plot=Plot("area_gain", "assumption", "area_over", kind="bars"),
        shown=("assumption", "area_gain", "gain_at_5", "gain_at_8", "area_over"),
    )


def _columns(name: str, claim: Claim) -> dict[str, float | None]:
    low, high = (None, None) if claim.interval is None else claim.interval
    return {name: claim.ours, f"{name}_low": low, f"{name}_high": high}


def _in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the assumptions that move the area gain most, from what was measured."""
    here, others = rows[0], sorted(rows[1:], key=lambda row: -abs(row["area_gain"] - rows[0]["area_gain"]))
    moved = [f"{row['assumption']}: {row['area_gain']:+.1f} %" for row in others]
    return (
        f"Against {here['area_gain']:+.1f} % in scenario paper, from what moves the area gain most to what moves it "
        f"least: {'; '.join(moved)}. In the "
        "literal scenario long answers cost more than they are worth on the large models, so latency_agnostic never "
        "overloads one and there is nothing left to route around."
    )
