"""A logistic regression on vectors: fitted here, stored as safetensors and a card in json.

    model = LinearModel.fit(features, labels, split_rows(labels), card)    # features of labelled texts, by an encoder
    model.save("my-judge")
    LinearModel.load("my-judge").probabilities(features)

Of the rows, one share chooses the strength of the L2 penalty and another measures the result; neither is fitted on.
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
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import spearmanr

from radq.errors import DataError, ModelError, OptionError
from radq.files import whole_folder
from radq.numerics import area_under_curve

PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # each fit begins where the stronger one ended
CARD, WEIGHTS = "judge.json", "judge.safetensors"


@dataclass(frozen=True)
class Card:
    """What a linear judge was made from, and how good it is on rows it has not seen."""

    encoder: str  # as it was asked for
    encoder_name: str  # by content
    label: str
    data: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)  # fitted, chosen on, measured on
    penalty: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Split:
    """Rows to fit on, to choose the penalty on, and to measure on."""

    fitted: Int[np.ndarray, " f"]
    chosen_on: Int[np.ndarray, " c"]
    measured_on: Int[np.ndarray, " m"]


@dataclass(frozen=True)
class LinearModel:
    weight: Float[np.ndarray, " d"]
    bias: float
    card: Card

    def probabilities(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        return expit(self.logits(features))

    def logits(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """One logit per row. Each row is summed on its own, since with BLAS a logit may depend on the other rows."""
        return np.einsum("nd,d->n", features.astype(self.weight.dtype), self.weight) + self.bias

    @classmethod
    def fit(
        cls, features: Float[np.ndarray, "n d"], labels: Float[np.ndarray, " n"], split: Split, card: Card
    ) -> "LinearModel":
        """Labels are in [0, 1]; those between count as probabilities, and above 0.5 as positive in the metrics."""
        fits = fit_path(features[split.fitted], labels[split.fitted])
        models = [cls(weight, bias, card) for weight, bias in fits]
        losses = [log_loss(model.logits(features[split.chosen_on]), labels[split.chosen_on]) for model in models]
        best = int(np.argmin(losses))
        logits, targets = models[best].logits(features[split.measured_on]), labels[split.measured_on]
        metrics = {
            "auc": area_under_curve(logits, targets),
            "accuracy": float(((logits > 0) == (targets > 0.5)).mean()),
            "positive_share": float((targets > 0.5).mean()),
            "log_loss": log_loss(logits, targets),
        }
        if not np.isin(labels, (0, 1)).all():  # an order among the labels to agree with
            metrics["spearman"] = float(spearmanr(logits, targets).statistic)  # pyright: ignore[reportAttributeAccessIssue]
        rows = {name: len(part) for name, part in vars(split).items()}
        return replace(models[best], card=replace(card, rows=rows, penalty=PENALTIES[best], metrics=metrics))

    def digest(self) -> str:
        """Changes with whatever changes a score."""
        content = self.card.encoder_name.encode() + self.weight.tobytes() + np.float64(self.bias).tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def save(self, folder: str | Path) -> None:
        tensors = {"weight": torch.from_numpy(self.weight), "bias": torch.tensor(self.bias, dtype=torch.float64)}
        with whole_folder(folder) as temporary:
            save_file(tensors, temporary / WEIGHTS)
            (temporary / CARD).write_text(json.dumps(asdict(self.card), indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> "LinearModel":
        folder = Path(folder)
        if not (folder / CARD).is_file() or not (folder / WEIGHTS).is_file():
            raise ModelError(f"{str(folder)!r} holds no linear judge.", "make one with `radq judge train`.")
        try:
            card = Card(**json.loads((folder / CARD).read_text()))
            tensors = load_file(folder / WEIGHTS)
            return cls(tensors["weight"].numpy(), float(tensors["bias"]), card)
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"the judge in {str(folder)!r} is damaged: {error}.", "train it anew.") from error


def split_rows(labels: Float[np.ndarray, " n"], share: float = 0.1, seed: int = 0) -> Split:
    """A random share of the rows to choose on, as many to measure on, the rest to fit; each with both kinds of rows."""
    if not 0 < share <= 0.4:
        raise OptionError(f"held_out is {share}.", "give a share above 0 and up to 0.4; it is taken twice.")
    if not ((labels >= 0) & (labels <= 1)).all():
        raise DataError(f"labels run from {labels.min():g} to {labels.max():g}.", "a judge learns labels in [0, 1].")
    rng = np.random.default_rng(seed)
    kinds = []
    for kind, of_kind in (("negative", labels <= 0.5), ("positive", labels > 0.5)):
        rows = rng.permutation(np.flatnonzero(of_kind))
        if len(rows) < 3:
            raise DataError(f"{len(rows)} rows are {kind}.", "a judge needs three of each kind at least.")
        size = min(max(1, round(share * len(rows))), (len(rows) - 1) // 2)
        kinds.append((rows[2 * size :], rows[:size], rows[size : 2 * size]))
    return Split(*(np.sort(np.concatenate(part)) for part in zip(*kinds, strict=True)))


def fit_path(features: Float[np.ndarray, "n d"], labels: Float[np.ndarray, " n"]) -> list[tuple[np.ndarray, float]]:
    """(weight, bias) for each of `PENALTIES`: the minimum of the mean log loss plus penalty/2 · ‖weight‖²."""
    features, labels = features.astype(np.float64), labels.astype(np.float64)
    parameters = np.zeros(features.shape[1] + 1)
    fits = []
    for penalty in PENALTIES:

        def loss(parameters: np.ndarray, penalty: float = penalty) -> tuple[float, np.ndarray]:
            weight, bias = parameters[:-1], parameters[-1]
            logits = features @ weight + bias
            errors = expit(logits) - labels
            gradient = np.append(features.T @ errors / len(labels) + penalty * weight, errors.mean())
            return log_loss(logits, labels) + penalty / 2 * float(weight @ weight), gradient

        result: Any = minimize(loss, parameters, jac=True, method="L-BFGS-B", options={"maxiter": 500})
        parameters = result.x
        fits.append((parameters[:-1].copy(), float(parameters[-1])))
    return fits


def log_loss(logits: Float[np.ndarray, " n"], labels: Float[np.ndarray, " n"]) -> float:
    """Mean cross-entropy of labels in [0, 1]."""
    return float((np.logaddexp(0, logits) - labels * logits).mean())
