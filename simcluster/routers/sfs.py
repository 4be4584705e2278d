"""SFS: simulate every engine forward to the request's first token, then choose by the objective."""

from typing import ClassVar

import numpy as np

from simcluster import _native
from simcluster.errors import ConfigError
from simcluster.instance import InstanceSpec
from simcluster.request import FloatArray, IntArray, Request, RequestColumns, untouched_columns
from simcluster.routers.base import NONE_HEALTHY, ClusterView, Decision, OracleView
from simcluster.routers.settings import RouterSettings
from simcluster.units import PS_PER_S

__all__ = ["NativeCluster", "Oracle", "Sfs"]


class NativeCluster:
    """The views of one router, ready for native decisions, and the ways to and from the engines."""

    def __init__(self, view: ClusterView) -> None:
        self.views = list(view.views)
        self._instances = view.instances
        kinds: dict[tuple[object, ...], int] = {}
        self.kind_of_view = [kinds.setdefault(_kind(spec), len(kinds)) for spec in view.instances]
        self.hop = np.array([spec.output_hop_ps for spec in view.instances], dtype=np.int64)
        self._delay: IntArray | None = None
        if all(spec.front_end.per_prompt_token_s == 0 for spec in view.instances):
            self._delay = np.array([spec.engine_arrival_ps(0, 1) for spec in view.instances], dtype=np.int64)

    def is_of(self, view: ClusterView) -> bool:
        """Whether this is the cluster that a router is shown."""
        return self._instances is view.instances and self.views == view.views

    def delays(self, prompt_tokens: IntArray) -> IntArray:
        """Return how long a request is on its way to the engines [ps], (j,)."""
        if self._delay is not None:
            return self._delay
        pairs = zip(self._instances, prompt_tokens.tolist(), strict=True)
        return np.array([spec.engine_arrival_ps(0, tokens) for spec, tokens in pairs], dtype=np.int64)

    def desk(self, fleet: _native.Fleet, columns: RequestColumns) -> _native.Desk | None:
        """Return what decides about the requests of these columns, or None where only `Fleet.decide` can."""
        slo_ps = columns.slo_ttft_ps
        if self._delay is None or slo_ps.max(initial=0) > _EXACT:
            return None
        return _native.Desk(
            fleet,
            columns.group_of_instance,
            self._delay,
            self.hop,
            columns.predicted_utility,
            columns.prompt_tokens,
            columns.predicted_output_tokens,
            columns.max_tokens,
            columns.priority,
            np.where(slo_ps >= 0, slo_ps / PS_PER_S, np.inf),
        )


_EXACT = 2**53  # whole numbers up to here are floats


def _kind(spec: InstanceSpec) -> tuple[object, ...]:
    """Return what a request is usually the same to."""
    return spec.model, spec.card, spec.price_in, spec.price_out


class Sfs:
    """The objective of eq. 3 or eq. 5 on TTFT estimates by forward simulation.

    Only instances that can win or come second are estimated, unless the settings ask for all candidates.
    Source: the paper, eqs. 3, 5, 7, 8.
    """

    needs_view: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._cluster: NativeCluster | None = None
        self._fleet: _native.Fleet | None = None
        self._desk: _native.Desk | None = None
        self._columns: RequestColumns | None = None  # the desk's
        weighted = settings.objective == "weighted"
        self._objective = _native.Objective.weighted if weighted else _native.Objective.slo
        self._explain = _native.Explain.all if settings.all_candidates else _native.Explain.runner_up

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Choose by predicted utility and estimated TTFT."""
        if self._cluster is None or self._fleet is None or not self._cluster.is_of(view):
            self._cluster = NativeCluster(view)
            self._fleet = _native.Fleet(self._cluster.views, self._cluster.kind_of_view)
            self._desk = self._columns = None
        healthy = view.healthy if False in view.healthy else ()
        sent_ps = view.now_ps + view.router_delay_ps
        columns = untouched_columns(request)
        if columns is not None and columns is not self._columns:
            self._desk, self._columns = self._cluster.desk(self._fleet, columns), columns
        if columns is not None and self._desk is not None:
            answer = self._desk.decide(
                request.index,
                request.arrival_ps,
                sent_ps,
                objective=self._objective,
                latency_weight=self._settings.latency_weight,
                explain=self._explain,
                healthy=healthy,
            )
        else:
            answer = self._decide(self._cluster, self._fleet, request, sent_ps, healthy)
        reason, none_healthy, best, ttft_s, score = answer
        return Decision(
            self._settings.ties.pick(best), NONE_HEALTHY if none_healthy else reason, ttft_s, score, num_tied=len(best)
        )

    def _decide(
        self, cluster: NativeCluster, fleet: _native.Fleet, request: Request, sent_ps: int, healthy: tuple[bool, ...]
    ) -> tuple[str, bool, IntArray, FloatArray, FloatArray]:
        """Decide about a request that is no row of columns, or not any more."""
        return fleet.decide(
            request.index,
            request.predicted_utility,
            request.prompt_tokens,
            request.predicted_output_tokens,
            cluster.delays(request.prompt_tokens),
            cluster.hop,
            max_tokens=request.max_tokens,
            priority=request.priority,
            arrival_time=request.arrival_ps,
            target_s=request.slo_ttft_ps / PS_PER_S if request.slo_ttft_ps >= 0 else np.inf,
            objective=self._objective,
            latency_weight=self._settings.latency_weight,
            explain=self._explain,
            healthy=healthy,
            sent=sent_ps,
        )


class Oracle(Sfs):
    """SFS with true answer lengths, true step times and an always fresh view: a bound, not a policy to use.

    Only the simulated backend can build its view. Quality stays predicted, step noise stays unknown.
    Source: upper bound; needs what no router can have.
    """

    def route(self, request: Request, view: ClusterView) -> Decision:
        """Choose as SFS does, from the truth.

        Raises:
            ConfigError: the view is not the oracle's, as with real backends.
        """
        if not isinstance(view, OracleView):
            raise ConfigError("policy 'oracle' needs the simulator's truth; choose another policy for live use")
        return super().route(request, view)
