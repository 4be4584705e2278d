"""Predict a whole table: qualities, answer lengths and, with prices, costs."""

from collections.abc import Callable, Mapping

import numpy as np
import polars as pl

from simcluster.predict.cost import Price, prices_of
from simcluster.predict.predictor import Predictor
from simcluster.predict.table import Table
from simcluster.predict.train import matrix_of, starts_of

__all__ = ["predicted_table"]


def predicted_table(
    predictor: Predictor,
    table: Table,
    *,
    allow_unseen: bool = False,
    prices: Mapping[str, Price] | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> pl.DataFrame:
    """Return the table's rows with predictions: predicted_score, predicted_output_tokens, cost_micro_usd, unseen.

    Prompt tokens are the table's, else the predictor's own count.

    Args:
        predictor: what predicts; a head that it lacks gives no column.
        table: prompts and models.
        allow_unseen: predict models that were not trained on, flagged `unseen` = 1.
        prices: per model; empty or None: no costs.
        progress: told the share that is done.

    Raises:
        PredictorError: a model was not trained on, has no price, or the predictor has no length head to price.
    """
    names = [each.name for each in table.models]
    of_model = predictor.model_rows(names, allow_unseen)
    price = np.array(prices_of(names, prices)) if prices else None
    features = []
    for k, prompt in enumerate(table.prompts):
        features.append(predictor.features(prompt))
        if k % 256 == 0:
            progress(0.8 * k / len(table.prompts))
    matrix = matrix_of(predictor, table, np.stack(features), of_model)
    columns: dict[str, object] = {
        "prompt": [table.prompts[k] for k in table.prompt],
        "model": [names[k] for k in table.model],
    }
    if table.task is not None:
        columns["task"] = table.task.tolist()
    for kind, name in (("accuracy", "predicted_score"), ("length", "predicted_output_tokens")):
        if kind in predictor.heads:
            columns[name] = predictor.heads[kind].predict(matrix, starts_of(predictor, table, kind))
    if price is not None:
        length = predictor.head("length").predict(matrix, starts_of(predictor, table, "length"))
        counted = np.array([len(predictor.tokens.ids(prompt)) for prompt in table.prompts])[table.prompt]
        prompt_tokens = np.where(np.isnan(table.prompt_tokens), counted, table.prompt_tokens)
        of_row = price[table.model]
        columns["cost_micro_usd"] = prompt_tokens * of_row[:, 0] + length * of_row[:, 1]
    columns["unseen"] = np.isnan(of_model[:, 0])[table.model].astype(np.int8)
    return pl.DataFrame(columns)
