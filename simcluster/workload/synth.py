"""Synthetic traces from recipe files.

python -m simcluster.workload.synth traces/recipes/quickstart.yaml traces/quickstart.parquet
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import yaml
from pydantic import ValidationError

from simcluster.errors import ConfigError, SimclusterError
from simcluster.rng import Stream, generator
from simcluster.workload.arrivals import poisson_arrivals_ns
from simcluster.workload.slo import ttft_targets_s
from simcluster.workload.tasks import Recipe, draw_mix
from simcluster.workload.trace import Trace
from simcluster.workload.trace_file import write_trace

__all__ = ["load_recipe", "main", "make_trace"]


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe file (YAML).

    Raises:
        ConfigError: the file is unreadable or breaks the recipe's rules; one line that says where.
    """
    where = os.fspath(path)
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot read the recipe ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from error
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the recipe"
        found = "" if first["type"] == "missing" else f" (found {first['input']!r:.80})"
        raise ConfigError(f"{where}: {key}: {first['msg']}{found}") from error


def make_trace(recipe: Recipe, replication: int = 0) -> Trace:
    """Draw a synthetic trace: Poisson arrivals, the recipe's task mix, TTFT targets of paper B.2.

    The column output_tokens holds the lengths of the model `recipe.output_tokens_of`; all models
    are in output_tokens_by_model. The trace's metadata holds the whole recipe.

    Args:
        recipe: what to draw.
        replication: replication of the recipe's seed.

    Raises:
        ConfigError: the arrivals go beyond the clock's range.
    """
    mix = draw_mix(recipe, recipe.requests, replication)
    targets_s = ttft_targets_s(mix.prompt_tokens, recipe.seed, replication, recipe.slo_scale)
    arrivals = generator(recipe.seed, Stream.ARRIVALS, replication)
    return Trace.from_columns(
        poisson_arrivals_ns(recipe.rate_rps, recipe.requests, arrivals),
        mix.prompt_tokens,
        mix.output_tokens[recipe.output_tokens_of],
        task=mix.task,
        task_names=mix.task_names,
        slo_ttft_ns=np.rint(targets_s * 1e9).astype(np.int64),
        output_tokens_by_model=mix.output_tokens,
        quality_by_model=mix.quality,
        metadata={
            "source": f"synthetic, recipe {recipe.name}; no measured prompts, answers or scores",
            "licence": "Apache-2.0",
            "recipe": recipe.model_dump_json(exclude_none=True),
            "seed": str(recipe.seed),
            "replication": str(replication),
        },
    )


def main(arguments: list[str] | None = None) -> int:
    """Make a trace file from a recipe file; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simcluster.workload.synth", description="Make a synthetic trace.")
    parser.add_argument("recipe", help="recipe file (YAML)")
    parser.add_argument("out", help="trace file to write (Parquet)")
    options = parser.parse_args(arguments)
    try:
        trace = make_trace(load_recipe(options.recipe))
        write_trace(trace, options.out)
    except SimclusterError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{options.out}: {len(trace):,} requests\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
