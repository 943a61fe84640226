"""Logistic regression on the vectors of an encoder, stored as safetensors with a card in JSON.

    model = LinearModel.fit(features, labels, split_rows(labels), card)    # features of labelled texts
    model.save("my-judge")
    LinearModel.load("my-judge").probabilities(features)

The model is fitted on most of the rows. One share of the others chooses the strength of the L2 penalty, and another one
measures the result.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from scipy.special import expit

from radq.errors import DataError, ModelError, OptionError, require_package
from radq.files import atomic_folder
from radq.judges.agreement import area_under_curve, rank_correlation
from radq.judges.base import CARD

PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MAX_ITERATIONS = 10_000
WEIGHTS = "judge.safetensors"


@dataclass(frozen=True)
class Card:
    """The data and encoder of a linear judge, and its metrics on rows that it was not fitted on."""

    encoder: str  # the name or folder it was loaded by
    encoder_name: str  # identifies its content
    label: str
    data: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)  # numbers of rows: fitted, chosen_on, measured_on
    penalty: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Split:
    """Positions of the rows to fit on, to choose the penalty on, and to measure the result on."""

    fitted: Int[np.ndarray, " f"]
    chosen_on: Int[np.ndarray, " c"]
    measured_on: Int[np.ndarray, " m"]


@dataclass(frozen=True)
class LinearModel:
    """The weights of a logistic regression, with their card."""

    weight: Float[np.ndarray, " d"]
    bias: float
    card: Card

    def probabilities(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        return expit(self.logits(features))

    def logits(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """Compute one logit per row. Each row is summed on its own: with BLAS, a logit may depend on the other rows."""
        return np.einsum("nd,d->n", features.astype(self.weight.dtype), self.weight) + self.bias

    @classmethod
    def fit(
        cls, features: Float[np.ndarray, "n d"], labels: Float[np.ndarray, " n"], split: Split, card: Card
    ) -> "LinearModel":
        """Fit on labels from 0 to 1. Those in between are probabilities; metrics take labels above 0.5 as positive."""
        fits = fit_path(features[split.fitted], labels[split.fitted])
        models = [cls(weight, bias, card) for weight, bias in fits]
        losses = [log_loss(model.logits(features[split.chosen_on]), labels[split.chosen_on]) for model in models]
        best = int(np.argmin(losses))
        logits, targets = models[best].logits(features[split.measured_on]), labels[split.measured_on]
        metrics = {
            "auc": area_under_curve(logits, targets > 0.5),
            "accuracy": float(((logits > 0) == (targets > 0.5)).mean()),
            "positive_share": float((targets > 0.5).mean()),
            "log_loss": log_loss(logits, targets),
        }
        if not np.isin(labels, (0, 1)).all():  # the labels have an order, which the logits should have too
            metrics["spearman"] = rank_correlation(logits, targets) or 0.0
        rows = {name: len(part) for name, part in vars(split).items()}
        return replace(models[best], card=replace(card, rows=rows, penalty=PENALTIES[best], metrics=metrics))

    def digest(self) -> str:
        """Hash all that a score depends on: the encoder, the weight and the bias."""
        content = self.card.encoder_name.encode() + self.weight.tobytes() + np.float64(self.bias).tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def save(self, folder: str | Path) -> None:
        """Write judge.json and judge.safetensors."""
        tensors = {"weight": torch.from_numpy(self.weight), "bias": torch.tensor(self.bias, dtype=torch.float64)}
        with atomic_folder(folder) as temporary:
            save_file(tensors, temporary / WEIGHTS)
            (temporary / CARD).write_text(json.dumps(asdict(self.card), indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> "LinearModel":
        """Read a model that `save` has written."""
        folder = Path(folder)
        if not (folder / CARD).is_file() or not (folder / WEIGHTS).is_file():
            raise ModelError(f"{str(folder)!r} holds no linear judge.", "train one with `radq judge train`.")
        try:
            card = Card(**json.loads((folder / CARD).read_text()))
            tensors = load_file(folder / WEIGHTS)
            return cls(tensors["weight"].numpy(), float(tensors["bias"]), card)
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"the judge in {str(folder)!r} is damaged: {error}.", "train it again.") from error


def split_rows(labels: Float[np.ndarray, " n"], share: float = 0.1, seed: int = 0) -> Split:
    """Split rows at random: a share to choose on, as many to measure on, the rest to fit. Each has both classes."""
    if not 0 < share <= 0.4:
        raise OptionError(
            f"held_out must be more than 0 and at most 0.4, got {share}.", "give a smaller share: it is taken twice."
        )
    if not ((labels >= 0) & (labels <= 1)).all():
        raise DataError(f"labels must be from 0 to 1, got {labels.min():g} to {labels.max():g}.", "scale the labels.")
    rng = np.random.default_rng(seed)
    kinds = []
    for kind, of_kind in (("negative", labels <= 0.5), ("positive", labels > 0.5)):
        rows = rng.permutation(np.flatnonzero(of_kind))
        if len(rows) < 3:
            raise DataError(f"a judge needs at least 3 {kind} rows, got {len(rows)}.", "add some to the data.")
        size = min(max(1, round(share * len(rows))), (len(rows) - 1) // 2)
        kinds.append((rows[2 * size :], rows[:size], rows[size : 2 * size]))
    return Split(*(np.sort(np.concatenate(part)) for part in zip(*kinds, strict=True)))


def fit_path(features: Float[np.ndarray, "n d"], labels: Float[np.ndarray, " n"]) -> list[tuple[np.ndarray, float]]:
    """Fit (weight, bias) for each of `PENALTIES`: the minimum of the mean log loss plus penalty/2 · ‖weight‖².

    A row with a label between 0 and 1 counts twice, as a positive with weight `label` and as a negative with the rest.
    """
    features, shares = features.astype(np.float64), labels.astype(np.float64)
    if np.isin(shares, (0, 1)).all():
        rows, targets, weights = features, shares, np.ones(len(shares))
    else:
        rows = np.concatenate([features, features])
        targets = np.repeat([1.0, 0.0], len(shares))
        weights = np.concatenate([shares, 1 - shares])
    # Each fit begins where the one with the stronger penalty ended.
    regression: Any = require_package("sklearn.linear_model", "eval").LogisticRegression(
        warm_start=True, tol=1e-6, max_iter=MAX_ITERATIONS
    )
    fits = []
    for penalty in PENALTIES:
        regression.set_params(C=1 / (penalty * len(shares))).fit(rows, targets, sample_weight=weights)
        fits.append((regression.coef_[0].copy(), float(regression.intercept_[0])))
    return fits


def log_loss(logits: Float[np.ndarray, " n"], labels: Float[np.ndarray, " n"]) -> float:
    """Average the cross-entropy of labels from 0 to 1."""
    return float((np.logaddexp(0, logits) - labels * logits).mean())
