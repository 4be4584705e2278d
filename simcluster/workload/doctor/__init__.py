"""The trace doctor: what a trace is like, before any run."""

from simcluster.workload.doctor.findings import inspect_trace
from simcluster.workload.doctor.offered_load import cluster_groups, offered_load
from simcluster.workload.doctor.sharing import hit_rate_bound, shared_prefix_tokens

__all__ = ["cluster_groups", "hit_rate_bound", "inspect_trace", "offered_load", "shared_prefix_tokens"]
