"""Two heads behind one call, for one request at a time: most of a small prediction is what the call itself costs."""

import re
from ctypes import byref, c_int64, c_void_p
from itertools import chain
from typing import Any

import numpy as np

from simcluster.errors import PredictorError
from simcluster.predict.heads import Head
from simcluster.request import FloatArray

__all__ = ["JointHeads"]

_TREE = re.compile(r"^Tree=\d+\n", re.MULTILINE)
_END = "end of trees\n"
_FLOAT64, _BY_ROW, _RAW_SCORE, _ALL = 1, 1, 1, -1  # LightGBM's C API: data type, layout, what to predict, trees
_NOTHING = "num_leaves=1\nnum_cat=0\nleaf_value=0\nis_linear=0\nshrinkage=1\n\n\n"  # a tree that adds 0


class JointHeads:
    """The trees of several heads as the classes of one LightGBM model: a class is summed as its head is.

    Args:
        heads: heads of the same features.

    Raises:
        PredictorError: on predicting, LightGBM refuses.
    """

    def __init__(self, *heads: Head) -> None:
        import lightgbm  # noqa: PLC0415  (takes a second)

        self._booster = lightgbm.Booster(model_str=_joined([head.trees for head in heads]))
        self._low = np.array([head.low for head in heads])
        self._high = np.array([head.high for head in heads])
        library = getattr(lightgbm.basic, "_LIB", None)
        self._call: Any = getattr(library, "LGBM_BoosterPredictForMat", None)
        self._handle: Any = getattr(self._booster, "_handle", None)

    def predict(self, matrix: FloatArray, start: FloatArray | float = 0.0) -> FloatArray:
        """Predict rows, bit for bit what each head predicts, (n, heads).

        Args:
            matrix: (n, k) features.
            start: (n, heads) what the trees correct, as in training.
        """
        found = self._sums(matrix)
        values: FloatArray = np.minimum(np.maximum(found + start, self._low), self._high)
        return values

    def _sums(self, matrix: FloatArray) -> FloatArray:
        """Return what the trees sum up to, (n, heads): by LightGBM's C API, since its Python wrapper costs 0.02 ms."""
        if self._call is None or self._handle is None:
            return np.asarray(self._booster.predict(matrix, num_threads=1, raw_score=True)).reshape(len(matrix), -1)
        rows = np.ascontiguousarray(matrix, dtype=np.float64)
        found = np.empty((len(rows), len(self._low)))
        size = c_int64()
        place, into = c_void_p(rows.ctypes.data), c_void_p(found.ctypes.data)
        shape = (_FLOAT64, *rows.shape, _BY_ROW)
        status = self._call(self._handle, place, *shape, _RAW_SCORE, 0, _ALL, b"num_threads=1", byref(size), into)
        if status != 0 or size.value != found.size:
            raise PredictorError("LightGBM could not predict with the predictor's trees; train it again")
        return found


def _joined(texts: list[str]) -> str:
    """Return one model in LightGBM's text, whose trees are in turn those of each of the models."""
    head, *_ = _TREE.split(texts[0], maxsplit=1)
    num = len(texts)
    lines = [f"num_class={num}", f"num_tree_per_iteration={num}"]
    kept = ("version=", "label_index=", "max_feature_idx=", "feature_names=", "feature_infos=")
    lines += [line for line in head.split("\n") if line.startswith(kept)]
    trees = [_TREE.split(text.partition(_END)[0])[1:] for text in texts]
    most = max(map(len, trees))
    in_turn = chain.from_iterable(zip(*(each + [_NOTHING] * (most - len(each)) for each in trees), strict=True))
    body = "".join(f"Tree={number}\n{tree}" for number, tree in enumerate(in_turn))
    return "\n".join(["tree", *lines, "", ""]) + body + _END
