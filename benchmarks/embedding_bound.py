"""The lower bound of `radq.rank.embedding_bound`, computed independently with numpy's least squares, row by row.

    radq rank data sst2_train.tsv.gz --text sentence --labels label --backbone embedded --save-matrix sst2.npz
    python benchmarks/embedding_bound.py sst2.npz --backbone embedded

The matrix file is read with numpy alone, and no code is shared with `radq.rank`. Rows with at most d + 1 continuations
are left out: their bound is 0 unless embeddings are linearly dependent.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from radq.models.loading import load_output_embedding


@dataclass
class Arguments:
    matrix: tyro.conf.Positional[Path]
    """File with the reward matrix of one label."""
    backbone: str = "embedded"
    """Language model whose output embedding is frozen."""


def main(arguments: Arguments) -> None:
    embedding = load_output_embedding(arguments.backbone).double().numpy()
    with np.load(arguments.matrix) as stored:
        starts, tokens, values, weights = (stored[name] for name in ("indptr", "indices", "data", "weights"))
        utterances = int(stored["counts"][0])
    sizes = np.diff(starts)
    squares, weighted = 0.0, 0.0
    for row in np.flatnonzero(sizes > embedding.shape[1] + 1):
        part = slice(starts[row], starts[row + 1])
        x, y, roots = np.c_[embedding[tokens[part]], np.ones(sizes[row])], values[part], np.sqrt(weights[part])
        error = float(np.square(y - x @ np.linalg.lstsq(x, y, rcond=None)[0]).sum())
        x, y = roots[:, None] * x, roots * y
        loss = float(np.square(y - x @ np.linalg.lstsq(x, y, rcond=None)[0]).sum())
        variance = values[part].var()
        print(f"{sizes[row]} continuations, variance {variance:.4f}, best fit {error / sizes[row]:.6f}")
        squares, weighted = squares + error, weighted + loss
    print(f"over Ω_2 {squares / sizes[sizes >= 2].sum():.6g}, over Ω {squares / len(values):.6g}, ", end="")
    print(f"of the training loss {weighted / utterances:.6g}")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
