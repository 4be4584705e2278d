"""What arrives: traces, arrival processes, task mixes and TTFT targets."""

from simcluster.workload.arrivals import poisson_arrivals_ns
from simcluster.workload.slo import ttft_targets_s
from simcluster.workload.tasks import DEFAULT_QUALITY
from simcluster.workload.trace import Trace
from simcluster.workload.trace_file import read_trace
from simcluster.workload.trace_writer import write_trace

__all__ = [
    "DEFAULT_QUALITY",
    "Trace",
    "poisson_arrivals_ns",
    "read_trace",
    "ttft_targets_s",
    "write_trace",
]
