"""Predictions from means over the trace: one per task and model."""

import numpy as np
import numpy.typing as npt

from simcluster.request import FloatArray

__all__ = ["task_means"]


def task_means(values: FloatArray, task: npt.NDArray[np.int32] | None) -> FloatArray:
    """Replace each value by the mean over the requests of its task.

    Args:
        values: (n, m) a property of n requests on m groups of instances.
        task: (n,) task numbers, or None: one mean for all.

    Returns:
        (n, m) float64.
    """
    if task is None:
        return np.broadcast_to(values.mean(axis=0), values.shape).copy()
    counts = np.bincount(task)
    result = np.empty(values.shape)
    for j in range(values.shape[1]):
        sums = np.bincount(task, weights=values[:, j], minlength=len(counts))
        result[:, j] = (sums / np.maximum(counts, 1))[task]
    return result
