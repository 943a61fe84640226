"""Samplers: which rows of a data set make a batch, and in which order batches come."""

from collections.abc import Iterator

import numpy as np
import torch


class GlobalBatches(torch.utils.data.Sampler[list[int]]):
    """Distributes the rows of an epoch over processes, in batches of rows of similar length and in random order.

    An epoch is a list of global batches that depends on seed and epoch alone. Each is cut into `num_micro_batches` ×
    `world_size` parts, so that the rows of an optimizer step do not depend on these two numbers. Parts differ by a row
    at most, and may be empty at the end of an epoch.
    """

    POOL = 50  # the batches that are sorted by length together, for less padding; their order stays random

    def __init__(
        self,
        lengths: np.ndarray,
        batch_size: int,
        num_micro_batches: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ):
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.num_micro_batches, self.rank, self.world_size = num_micro_batches, rank, world_size
        self.epoch = 0

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size) * self.num_micro_batches

    @property
    def rows_at_once(self) -> int:
        """The rows of the largest part."""
        return -(-self.batch_size // (self.num_micro_batches * self.world_size))

    def plan(self) -> list[np.ndarray]:
        """Global batches of the epoch, as indices of rows."""
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(len(self.lengths))
        pool = self.POOL * self.batch_size
        for first in range(0, len(order), pool):
            part = order[first : first + pool]
            order[first : first + pool] = part[np.argsort(self.lengths[part], kind="stable")]
        batches = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        return [batches[index] for index in rng.permutation(len(batches))]

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.plan():
            parts = np.array_split(batch, self.num_micro_batches * self.world_size)
            for micro_batch in range(self.num_micro_batches):
                yield parts[micro_batch * self.world_size + self.rank].tolist()


class LongestFirst(torch.utils.data.Sampler[int]):
    """All rows, the longest first, so that batches need little padding and full memory shows in the first one."""

    def __init__(self, lengths: np.ndarray):
        self.order = np.argsort(-lengths, kind="stable").tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)
