"""Where the training table of a predictor comes from: answers of running models, scored by a judge."""

from simcluster.calibrate.quality.collect import Plan, Result, collect
from simcluster.calibrate.quality.prompts import Prompt, read_prompts
from simcluster.calibrate.quality.service import Endpoint

__all__ = ["Endpoint", "Plan", "Prompt", "Result", "collect", "read_prompts"]
