"""Read foreign traces: recognise, convert, check, filter, put in order and write as a trace file."""

from simcluster.workload.importing.options import NAMED_UNITS, AmbiguousTraceError, Choice, ImportOptions, TimeUnit
from simcluster.workload.importing.report import ImportReport
from simcluster.workload.importing.run import import_trace

__all__ = ["NAMED_UNITS", "AmbiguousTraceError", "Choice", "ImportOptions", "ImportReport", "TimeUnit", "import_trace"]
