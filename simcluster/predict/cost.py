"""What answering a request is expected to cost."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from simcluster.errors import PredictorError
from simcluster.request import FloatArray

__all__ = ["Price", "expected_cost", "prices_of"]

Price = tuple[float, float]
"""Of prompt tokens and of output tokens [USD per million tokens = micro-dollars per token]."""


def expected_cost(
    prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike, prices: Sequence[Price] | FloatArray
) -> FloatArray:
    """Return `prompt * price_in + output * price_out` [micro-dollars], (n, j).

    Args:
        prompt_tokens: (n, j) [tokens].
        output_tokens: (n, j) predicted answer lengths [tokens].
        prices: of each of the j columns; as an array (j, 2).

    Source: paper section 3.
    """
    table = np.asarray(prices, dtype=np.float64)
    cost: FloatArray = np.asarray(prompt_tokens) * table[:, 0] + np.asarray(output_tokens) * table[:, 1]
    return cost


def prices_of(models: Sequence[str], prices: Mapping[str, Price]) -> list[Price]:
    """Return the price of each model.

    Raises:
        PredictorError: a model has none; it is never taken for free.
    """
    for model in models:
        if model not in prices:
            known = ", ".join(prices) or "no model"
            raise PredictorError(f"no price for the model {model!r}, only for {known}; give --price {model}=IN/OUT")
    return [prices[model] for model in models]
