"""Tokenised data from lists of token ids, as `load_data` leaves it."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from radq.data.dataset import RewardData
from radq.data.label_scale import NUMBER, LabelCells, LabelRules


def make_data(
    folder: Path,
    utterances: Sequence[Sequence[int]],
    labels: Sequence[float] | Sequence[Sequence[float]],
    prompt_lengths: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    rows: Sequence[int] | None = None,
) -> RewardData:
    folder.mkdir(parents=True, exist_ok=True)
    n = len(utterances)
    np.array([token for utterance in utterances for token in utterance], np.uint16).tofile(folder / "tokens.bin")
    np.save(folder / "offsets.npy", np.cumsum([0, *map(len, utterances)]))
    np.save(folder / "prompt_lengths.npy", np.array(prompt_lengths or [0] * n, np.int32))
    values = np.array(labels, np.float64).reshape(n, -1)  # one label, or a row of them
    kinds = np.full(values.shape, NUMBER, np.uint8)
    numbers = np.array(rows or range(1, n + 1))
    LabelCells(kinds, values, [[]] * values.shape[1], numbers, [(str(folder), n)]).save(folder)
    np.save(folder / "weights.npy", np.array(weights or [1.0] * n, np.float32))
    counts = {"rows": n, "tokens": sum(map(len, utterances))}
    (folder / "counts.json").write_text(json.dumps({"counts": counts, "dtype": "uint16"}))
    return RewardData(folder, ["label"] * values.shape[1], LabelRules(keep=True))
