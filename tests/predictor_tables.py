"""A small table of answers whose prompts state what decides their answers."""

from pathlib import Path

import polars as pl

from simcluster.predict.predictor import Predictor
from simcluster.predict.table import Table, read_table
from simcluster.predict.train import train_predictor
from simcluster.rng import seeded

__all__ = ["answers", "predictor"]

_WORDS = ["apple", "river", "stone", "cloud", "music", "paper", "green", "window", "garden", "bridge"]


def answers(file: Path, models: tuple[str, ...] = ("m1", "m2"), n: int = 120) -> Path:
    """Write a table: easy prompts and hard ones, with answers as long as they ask for; return its path."""
    rng = seeded(11, 0)
    rows = []
    for k in range(n):
        task = ("easy", "hard")[k % 2]
        words = int(rng.integers(1, 40)) * 10
        filler = " ".join(rng.choice(_WORDS, size=int(rng.integers(5, 40))))
        verb = "List facts about" if task == "easy" else "Explain the meaning of"
        prompt = f"{verb} {filler} no {k}. Use {words} words."
        difficulty, spread = 0.1 * rng.standard_normal(), rng.uniform(0.95, 1.05, size=4)
        for number, model in enumerate(models):
            score = (0.8 if task == "easy" else 0.4) + 0.1 * number + difficulty
            length = words * (1.5 + 0.5 * number) * spread[number]
            rows.append((prompt, model, task, min(max(score, 0.0), 1.0), max(1, round(length))))
    pl.DataFrame(rows, schema=["prompt", "model", "task", "score", "output_tokens"], orient="row").write_parquet(file)
    return file


def predictor(folder: Path) -> tuple[Predictor, Table]:
    """Return a predictor trained on such a table, and the table; it is trained once."""
    table = read_table(answers(folder / "t.parquet"))
    if not _TRAINED:
        _TRAINED.append(train_predictor(table, source="a test"))
    return _TRAINED[0], table


_TRAINED: list[Predictor] = []
