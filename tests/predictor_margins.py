"""Margins of predictors over task means on public answers, for several choices of the held-out prompts.

python tests/predictor_margins.py [SEEDS]

trains with `start="task_means"` once for each of so many seeds (5) and writes a row per set and head: the margin of
each seed, that of all together with a 95 % bootstrap interval over prompts (a prompt that two seeds hold out is drawn
with both), and what it would be worth to know how the other models did on the very prompt.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from shared_data import shared_data
from simcluster.predict.apply import predicted_table
from simcluster.predict.heads import HeadKind
from simcluster.predict.predictor import Split
from simcluster.predict.table import Table, read_table
from simcluster.predict.train import means_of, target_of, train_predictor
from simcluster.request import FloatArray, IntArray
from simcluster.rng import seeded

__all__ = ["TABLES", "Errors", "held_out_errors", "margin"]


def _llmrouter(folder: Path) -> pl.DataFrame:
    prompts = pl.read_parquet(folder / "llmrouter_prompts.parquet")
    scores = pl.read_parquet(folder / "llmrouter_scores.parquet").with_columns(pl.col("model").cast(pl.String))
    return scores.join(prompts, on="prompt_id").select("prompt", "model", "task", "score")


def _routellm(folder: Path) -> pl.DataFrame:
    table = pl.read_parquet(folder / "routellm_gsm8k_mmlu.parquet")
    task = pl.concat_str(pl.col("benchmark").cast(pl.String), pl.col("subject").cast(pl.String), separator="/")
    return pl.concat(
        table.select(
            "prompt",
            pl.lit(model).alias("model"),
            task.alias("task"),
            pl.col(f"{model}_correct").alias("score"),
            pl.col(f"{model}_output_tokens").alias("output_tokens"),
        )
        for model in ("mixtral_8x7b", "gpt4")
    )


def _alpaca_eval(folder: Path) -> pl.DataFrame:
    """Return the answers that were judged: 58 models."""
    prompts = pl.read_parquet(folder / "alpaca_eval_prompts.parquet")
    scores = pl.read_parquet(folder / "alpaca_eval_scores.parquet").filter(pl.col("win_gpt4turbo").is_not_null())
    return scores.join(prompts, on="prompt_id").select(
        "prompt",
        pl.col("model").cast(pl.String),
        pl.col("dataset").cast(pl.String).alias("task"),
        pl.col("win_gpt4turbo").alias("score"),
        pl.col("output_tokens_qwen").alias("output_tokens"),
    )


TABLES: dict[str, Callable[[Path], pl.DataFrame]] = {
    "routellm": _routellm,
    "llmrouter": _llmrouter,
    "alpaca_eval": _alpaca_eval,
}


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """Rows of held-out prompts.

    Attributes:
        prompt: (n,) number of each row's prompt.
        head: (n,) predicted less true.
        mean: (n,) task mean less true.
        others: (n,) the same of what the other models' values of the prompt explain, or NaN with one model alone.
    """

    prompt: IntArray
    head: FloatArray
    mean: FloatArray
    others: FloatArray


def held_out_errors(table: Table, source: str, seed: int) -> dict[HeadKind, Errors]:
    """Train on the prompts that a seed leaves, and return the errors on those that it holds out."""
    split = Split(seed=seed, held_out=0.2, validation=0.125)
    predictor = train_predictor(table, source=source, split=split, start="task_means")
    predictions = predicted_table(predictor, table)
    held = (split.positions(table.prompts) < split.held_out)[table.prompt]
    found: dict[HeadKind, Errors] = {}
    for kind in predictor.heads:
        target, means = target_of(table, kind), means_of(predictor, table, kind, by_task=True)
        column = "predicted_score" if kind == "accuracy" else "predicted_output_tokens"
        rows = held & ~np.isnan(target)
        others = _told_by_others(table, target - means, held)
        guesses = (predictions[column].to_numpy(), means, means + others)
        found[kind] = Errors(table.prompt[rows], *((guess - target)[rows] for guess in guesses))
    return found


def _told_by_others(table: Table, rest: FloatArray, held: npt.NDArray[np.bool_]) -> FloatArray:
    """Return what the mean rest of the other models on the same prompt tells of each row's, by slopes from training."""
    known = ~np.isnan(rest)
    count = np.bincount(table.prompt, weights=known)
    total = np.bincount(table.prompt, weights=np.where(known, rest, 0.0))
    others = (total[table.prompt] - rest) / np.where(count > 1, count - 1, np.nan)[table.prompt]
    told = np.full(len(rest), np.nan)
    for model in range(len(table.models)):
        here = (table.model == model) & ~np.isnan(others)
        x, y = others[here & ~held], rest[here & ~held]
        told[here] = others[here] * (x @ y / (x @ x) if len(x) else np.nan)
    return told


def margin(errors: Sequence[Errors], of: str = "head") -> dict[str, float]:
    """Return the share of the squared error of task means that is gone, with a 95 % bootstrap interval over prompts.

    Args:
        errors: of one set and head, under one or more seeds; a prompt is drawn with all its rows.
        of: what is compared with the means: head or others.
    """
    prompt = np.concatenate([each.prompt for each in errors])
    _, prompt = np.unique(prompt, return_inverse=True)
    squares = [np.concatenate([getattr(each, name) for each in errors]) ** 2 for name in (of, "mean")]
    sums = np.stack([np.bincount(prompt, weights=square) for square in squares])
    rng = seeded(1, 1)
    drawn = np.stack([sums[:, rng.integers(sums.shape[1], size=sums.shape[1])].sum(axis=1) for _ in range(1000)])
    low, high = np.percentile(1 - drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return {"value": float(1 - sums[0].sum() / sums[1].sum()), "low": float(low), "high": float(high)}


def _shown(found: dict[str, float]) -> str:
    return f"{found['value']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def main(seeds: int) -> None:
    """Print the table."""
    data = shared_data()
    if data is None:
        sys.exit("no shared data")
    sys.stdout.write(
        "| answers | head | each seed | all together | the other models' values |\n| --- | --- | --- | --- | --- |\n"
    )
    for name, make in TABLES.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.parquet"
            make(data / "quality").write_parquet(file)
            table = read_table(file)
        found = [held_out_errors(table, name, seed) for seed in range(1, seeds + 1)]
        for kind in found[0]:
            errors = [each[kind] for each in found]
            each_seed = ", ".join(f"{100 * margin([one])['value']:.1f}" for one in errors)
            together, others = _shown(margin(errors)), _shown(margin(errors, "others"))
            sys.stdout.write(f"| {name} | {kind} | {each_seed} | {together} | {others} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
