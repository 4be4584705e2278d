"""The exceptions that simcluster raises on purpose.

    SimclusterError
    |-- ConfigError         a scenario, an option or an argument is wrong
    |-- TraceError          a trace file is unreadable or breaks the schema
    |-- CardError           a calibration card is unreadable or incomplete
    |-- CalibrationError    measurements do not determine what was asked of them
    |-- PredictorError      a predictor file or a table for it is unreadable or does not fit
    |-- SimulationError     the engine cannot go on (livelock)
    |-- PolicyError         a user's policy raised an exception or chose no instance
    `-- ConformanceError    a recorded scenario file is unreadable

A message says where, what was found, what is allowed and how to fix it. The command line prints it as one
line and exits with code 2.
"""

__all__ = [
    "CalibrationError",
    "CardError",
    "ConfigError",
    "ConformanceError",
    "PolicyError",
    "PredictorError",
    "SimclusterError",
    "SimulationError",
    "TraceError",
]


class SimclusterError(Exception):
    """Base of every error that simcluster raises on purpose."""


class ConfigError(SimclusterError):
    """A scenario, an option or an argument is wrong."""


class TraceError(SimclusterError):
    """A trace file is unreadable or breaks the schema."""


class CardError(SimclusterError):
    """A calibration card is unreadable or incomplete."""


class CalibrationError(SimclusterError):
    """Measurements do not determine what was asked of them."""


class PredictorError(SimclusterError):
    """A predictor file or a table for it is unreadable or does not fit."""


class SimulationError(SimclusterError):
    """The engine cannot go on, for example two requests evict each other for ever."""


class PolicyError(SimclusterError):
    """A user's policy raised an exception or chose no instance."""


class ConformanceError(SimclusterError):
    """A file of recorded scheduler scenarios is unreadable."""
