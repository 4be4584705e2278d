"""Scenario files: the one place where user configuration is read.

A scenario says what arrives, on which instances, who routes and what is measured. Unknown keys, wrong types and
numbers out of range are errors that name their path.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simcluster.card import FitName
from simcluster.engine_options import EngineOptions
from simcluster.errors import ConfigError
from simcluster.shipped import find_file
from simcluster.validation import explain
from simcluster.yaml_files import load_yaml

__all__ = [
    "NO_RECIPE",
    "Cluster",
    "Instance",
    "Live",
    "Measure",
    "Noise",
    "Output",
    "PredictionError",
    "Price",
    "Routing",
    "Scenario",
    "Slo",
    "TrueModelSpec",
    "Workload",
    "load_scenario",
    "override",
]

_Weight = Annotated[float, Field(ge=0, le=1e6)]
_Factor = Annotated[float, Field(ge=1e-3, le=1e3)]
_Text = Annotated[str, Field(min_length=1)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
_Delay = Annotated[float, Field(ge=0, le=1e6)]  # the clock ends at 9e6 s
_Duration = Annotated[float, Field(gt=0, le=1e6)]
_Url = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9._\[\]:-]+(/[A-Za-z0-9._/-]*)?$", max_length=300)]
_Source = Annotated[str, Field(pattern=r"^(metrics|none|shm:[A-Za-z0-9][A-Za-z0-9._-]{0,99})$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Workload(_Model):
    """What arrives: a trace file or a recipe for a synthetic one."""

    trace: _Text | None = Field(None, description="trace file (Parquet, schema v1) or a shipped trace's name")
    recipe: _Text | None = Field(None, description="recipe file; the scenario's seed replaces its seed")
    rate_scale: Annotated[float, Field(ge=1e-6, le=1e6)] = Field(
        1.0, description="arrival rate times this; intervals are divided by it"
    )
    rate_rps: Annotated[float, Field(ge=1e-6, le=1e9)] | None = Field(
        None, description="mean arrival rate instead of the recipe's arrivals [1/s]"
    )
    burst_ratio: Annotated[float, Field(ge=1, le=1e6)] = Field(
        1.0, description="with rate_rps; 1: Poisson, above: the paper's MMPP-2 with this ratio of high to low rate"
    )
    limit: Annotated[int, Field(ge=1)] | None = Field(None, description="use the first requests only")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.trace is None) == (self.recipe is None):
            found = "neither" if self.trace is None else "both"
            raise ValueError(f"found {found} of trace and recipe; give exactly one")
        if self.rate_rps is not None and self.recipe is None:
            raise ValueError(f"rate_rps = {self.rate_rps:g}; needs a recipe; use rate_scale with a trace")
        if self.burst_ratio != 1 and self.rate_rps is None:
            raise ValueError(f"burst_ratio = {self.burst_ratio:g}; needs rate_rps; add it")
        return self


# What a workload loses when a trace takes the place of its recipe: a trace has its own arrivals.
NO_RECIPE: Final[dict[str, Any]] = {"recipe": None, "rate_rps": None, "burst_ratio": 1.0}


class Price(_Model):
    """Prices in USD per million tokens, which is micro-dollars per token."""

    input_usd_per_mtok: _Weight
    output_usd_per_mtok: _Weight


class Noise(_Model):
    """Noise of the true step time: a factor per step, independent of the others."""

    kind: Literal["auto", "recorded", "lognormal"] = Field(
        "auto",
        description="recorded: drawn from the card's recorded residuals; lognormal: assumed, mean 1; auto: recorded "
        "where the card has residuals and no sigma is given",
    )
    sigma: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="of the log-normal factor's logarithm; default 0.03"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.kind == "recorded" and self.sigma is not None:
            raise ValueError(f"sigma = {self.sigma:g}; recorded noise has none; leave it out, or kind: lognormal")
        return self


class TrueModelSpec(_Model):
    """How fast the simulated instance really is, apart from what routers believe."""

    fit: FitName | None = Field(None, description="fit of the card; default: the card's chosen fit")
    scale: _Factor = Field(1.0, description="factor on all coefficients")
    noise: Noise | None = Field(default_factory=Noise, description="null: no noise")


class BelievedModelSpec(_Model):
    """The step-time model that routers use."""

    fit: FitName = Field("eq9", description="fit of the card")
    scale: _Factor = Field(1.0, description="factor on all coefficients")


class Instance(_Model):
    """One instance, or several equal ones."""

    name: _Name | None = Field(None, description="default: the card's name; replicas get -1, -2, ...")
    card: _Text = Field(description="calibration card: a shipped one's name or a file")
    replicas: Annotated[int, Field(ge=1, le=100_000)] = 1
    price: Price
    quality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="quality of its answers where the trace has none; default: the model's synthetic mean",
    )
    engine: EngineOptions = Field(default_factory=EngineOptions, description="options by vLLM's names")
    true_model: TrueModelSpec = Field(default_factory=TrueModelSpec)
    believed_model: BelievedModelSpec = Field(default_factory=BelievedModelSpec)
    url: _Url | None = Field(None, description="live: where its server listens; replicas count its port up")
    snapshot: _Source = Field(
        "metrics",
        description="live: shm:NAME, what a server on this machine publishes (replicas: NAME-1, ...); metrics: the "
        "router's own streams and the server's /metrics; none: its rates alone",
    )


class Cluster(_Model):
    """The instances that requests are routed to."""

    instances: Annotated[list[Instance], Field(min_length=1)]


class PredictionError(_Model):
    """What is wrong with predicted answer lengths, for what-if experiments; drawn per request and model."""

    length_bias: _Factor = Field(1.0, description="mean factor on predicted lengths; below 1: too short")
    length_sigma: Annotated[float, Field(ge=0, le=5)] = Field(
        0.0, description="deviation of the logarithm of a log-normal factor"
    )


class Routing(_Model):
    """Who decides, by what objective, and how stale the view is."""

    policies: Annotated[list[_Text], Field(min_length=1)] = Field(
        ["sfs"], description="POLICY, POLICY:key=value,..., WRAPPER(POLICY) or file.py:Class; see `policy list`"
    )
    objective: Literal["slo", "weighted"] = Field("slo", description="slo: paper eq. 3; weighted: eq. 5")
    cost_weight: _Weight = Field(1e-4, description="lambda, utility per micro-dollar")
    latency_weight: _Weight = Field(1.0, description="delta, utility per second (weighted objective)")
    tie: Literal["index", "rotate", "random"] = "index"
    refresh_interval_s: _Delay = Field(0.0, description="0: the view is refreshed at every decision")
    publish_delay_s: _Delay = Field(0.0, description="age of a snapshot when it becomes visible")
    replicas: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="independent routers; requests are dealt to them in turn"
    )
    overlay: bool = Field(True, description="count own requests sent after the snapshot")
    router_delay_s: _Delay = Field(0.0, description="from the decision to the instance")
    predictor: _Text = Field(
        "means",
        description="means: the trace's own per task and model; or a predictor file, or a shipped one's name: the "
        "trace then needs prompts",
    )
    tokenizer: _Text | None = Field(None, description="tokenizer.json that the predictor was trained with")
    prediction_error: PredictionError = Field(default_factory=PredictionError)

    @model_validator(mode="after")
    def _not_too_often(self) -> Self:
        for name in ("refresh_interval_s", "publish_delay_s"):
            value = getattr(self, name)
            if 0 < value < 1e-6:
                raise ValueError(f"{name} = {value:g}; must be 0 or at least 1e-6; correct the value")
        return self


class Measure(_Model):
    """What counts."""

    horizon_s: Annotated[float, Field(gt=0, le=4e6)] | None = Field(
        None, description="the run stops here, events at this instant included"
    )
    warmup_s: Annotated[float, Field(ge=0, le=4e6)] = Field(0.0, description="events before this instant do not count")
    drain: bool = Field(True, description="without a horizon: run on after the last arrival until all is done")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.horizon_s is not None and self.warmup_s >= self.horizon_s:
            raise ValueError(
                f"warmup_s = {self.warmup_s:g}; must be below horizon_s = {self.horizon_s:g}; change one of them"
            )
        return self


class Slo(_Model):
    """Targets; a request is good if every given one is met, limits included."""

    ttft: Literal["trace", "paper", "none"] | _Duration | None = Field(
        None,
        description="trace: the trace's own targets; paper: drawn by B.2; a number [s]; none; "
        "default: the trace's own where it has them, else paper",
    )
    ttft_scale: _Factor = Field(1.0, description="factor on every TTFT target")
    tpot_s: _Duration | None = None


class Output(_Model):
    """What is written."""

    decisions: Literal["winner", "full", "off"] = "winner"
    sample_interval_s: Annotated[float, Field(ge=1e-3, le=1e6)] = Field(1.0, description="time series of the instances")
    estimators: list[_Text] = Field(
        default_factory=list,
        description="TTFT estimators to score at every decision without letting them decide: sfs, throughput, lps, ...",
    )


class Live(_Model):
    """How a router in front of real servers goes about it; nothing of this touches a simulation."""

    fresh_s: _Duration = Field(0.5, description="a younger view is fresh")
    usable_s: _Duration = Field(5.0, description="an older view is not used any more")
    when_old: Literal["in_flight", "lps"] = Field(
        "in_flight", description="without a usable view: by the router's own open requests there, or by rates alone"
    )
    scrape_interval_s: _Duration = Field(0.2, description="between two readings of /metrics")
    connect_timeout_s: _Duration = 5.0
    first_byte_timeout_s: _Duration = Field(60.0, description="for a stream; then another instance gets the request")
    whole_timeout_s: _Duration = Field(600.0, description="the same for an answer in one piece, which comes at its end")
    stall_timeout_s: _Duration = Field(60.0, description="between two pieces of an answer, sent or taken")
    retries: Annotated[int, Field(ge=0, le=100)] = Field(2, description="further instances tried for one request")
    trip_after: Annotated[int, Field(ge=1, le=1000)] = Field(3, description="failures in a row that mark an instance")
    mark_s: _Duration = Field(5.0, description="a marked instance is tried again after this, doubled up to 12 times it")
    all_unhealthy: Literal["least_bad", "refuse"] = Field(
        "least_bad", description="where every instance is marked: try the best of them, or answer 503"
    )
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**31)] = 8 * 2**20
    max_header_bytes: Annotated[int, Field(ge=1024, le=2**20)] = 16_384
    max_streams: Annotated[int, Field(ge=1, le=1_000_000)] = Field(10_000, description="open requests; then 503")
    drain_s: _Delay = Field(30.0, description="open answers may take so long when the router stops")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.usable_s < self.fresh_s:
            raise ValueError(
                f"usable_s = {self.usable_s:g}; must be at least fresh_s = {self.fresh_s:g}; change one of them"
            )
        return self


class Scenario(_Model):
    """A scenario file."""

    schema_version: Literal[1] = 1
    name: _Name
    description: str = ""
    assumptions: list[str] = Field(default_factory=list, description="shown with every result")
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1
    workload: Workload
    cluster: Cluster
    routing: Routing = Field(default_factory=Routing)
    measure: Measure = Field(default_factory=Measure)
    slo: Slo = Field(default_factory=Slo)
    output: Output = Field(default_factory=Output)
    live: Live = Field(default_factory=Live)

    def resolved(self) -> dict[str, Any]:
        """Return the scenario with every default filled in, as plain data."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Return a hash of the resolved scenario."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def load_scenario(name: str) -> tuple[Scenario, Path]:
    """Read a scenario.

    Args:
        name: a file, or the name of a shipped scenario.

    Returns:
        The scenario and where it was found.

    Raises:
        ConfigError: it was not found or is not valid; one line: file: path = value; allowed; fix.
    """
    path = find_file(name, "scenarios", ".yaml")
    data = load_yaml(path)
    if not isinstance(data, dict):
        found = "an empty file" if data is None else type(data).__name__
        raise ConfigError(f"{path}: found {found}; must be a mapping with name, workload and cluster")
    try:
        return Scenario.model_validate(data), path
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, Scenario)}") from None


def override(
    scenario: Scenario,
    *,
    policies: list[str] | None = None,
    trace: Path | None = None,
    rate_scale: float | None = None,
    seed: int | None = None,
    limit: int | None = None,
    decisions: str | None = None,
    estimators: list[str] | None = None,
) -> Scenario:
    """Replace fields of a scenario by options of the command line, under the same rules.

    Raises:
        ConfigError: a value is not allowed.
    """
    data = scenario.model_dump()
    if policies:
        data["routing"]["policies"] = policies
    if trace is not None:
        data["workload"] |= {"trace": str(trace.absolute()), **NO_RECIPE}
    if rate_scale is not None:
        data["workload"]["rate_scale"] = rate_scale
    if seed is not None:
        data["seed"] = seed
    if limit is not None:
        data["workload"]["limit"] = limit
    if decisions is not None:
        data["output"]["decisions"] = decisions
    if estimators is not None:
        data["output"]["estimators"] = estimators
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"option: {explain(error, Scenario)}") from None
