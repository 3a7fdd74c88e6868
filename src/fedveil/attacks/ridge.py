"""Ridge regression in its dual form, with the penalty chosen by exact leave-one-out errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

# In parts of the mean squared length of a row: from "nothing is to be learned" to "there is no noise at all".
PENALTIES = tuple(10 ** (power / 2) for power in range(4, -13, -1))


@dataclass(frozen=True, eq=False)
class Rows:
    """Examples to learn from: a row of features and what it stands for."""

    learned: Tensor  # (n, d): features that the regression is fitted to
    observed: Tensor  # (n, d): features of the same examples as they will be met later; perhaps the same tensor
    wanted: Tensor  # (n, p): what is to be told from the features
    weight: Tensor  # (n,): how much an example counts
    judged: Tensor  # (n,): whether it is held out to choose the penalty by


@dataclass(frozen=True, eq=False)
class Ridge:
    """The map from features to what they stand for that minimizes Σ weight·‖error‖² + penalty·‖map‖², with a constant.

    Fitted in the dual form, by one eigendecomposition of the n × n kernel, which serves all penalties.
    """

    learned: Tensor  # (n, d)
    wanted: Tensor  # (n, p)
    root: Tensor  # (n,) roots of the weights
    vectors: Tensor  # (n, n) eigenvectors of the weighted kernel
    inverse: Tensor  # (n,) 1 / (eigenvalue + penalty)
    constant: float  # what the constant adds to every entry of the kernel
    error: float  # the mean squared error on examples left out, over all wanted entries

    @classmethod
    def fit(cls, rows: Rows, directions: Tensor | None = None, penalties: tuple[float, ...] = PENALTIES) -> Self:
        """The regression with the penalty whose leave-one-out error is the least.

        directions: (p, q) normal numbers. The error is measured along these alone: with many wanted entries that is
        as good and much cheaper.
        """
        kernel = (rows.learned @ rows.learned.T).double()
        met = kernel if rows.observed is rows.learned else (rows.observed @ rows.learned.T).double()
        size = max(float(kernel.diagonal()[rows.judged].mean()), 1e-30)
        # A constant as large as the features is next to free: n examples stand against one penalty.
        kernel, met, root = kernel + size, met + size, rows.weight.double().sqrt()
        values, vectors = torch.linalg.eigh(kernel * root * root[:, None])
        values = values.clamp_min(0.0)  # rounding
        shown = rows.wanted.double() if directions is None else rows.wanted.double() @ directions.double()
        turned, towards = vectors.T @ (shown * root[:, None]), (met * root) @ vectors
        across, squares = towards * vectors, vectors.square()
        best: tuple[float, Tensor] | None = None
        for penalty in penalties:
            inverse = 1 / (values + penalty * size)
            solved = inverse[:, None] * turned
            # Without example i, the dual solution is that of all less a multiple of the i-th column of the inverse.
            ratio = (across @ inverse) / (squares @ inverse)
            missed = towards @ solved - ratio[:, None] * (vectors @ solved) - shown
            error = float(missed[rows.judged].square().mean())
            if best is None or error < best[0]:
                best = error, inverse
        assert best is not None
        return cls(rows.learned, rows.wanted, root, vectors, best[1], size, best[0])

    def predict(self, features: Tensor) -> Tensor:
        """What one row of observed features (d,) stands for: shape (p,)."""
        towards = ((self.learned @ features).double() + self.constant) * self.root
        shares = self.vectors @ (self.inverse * (self.vectors.T @ towards)) * self.root
        return shares @ self.wanted.double()
