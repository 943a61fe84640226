"""The methods that `--worker-extension-cls radq.hosts.vllm_worker.GuideWorker` gives to vLLM's workers.

vLLM's server lives in another process than the guides; it calls these methods of all workers to ask for figures. Those
that draw the same tokens as another worker, under tensor parallelism, have nothing to say about them.
"""

from collections.abc import Sequence
from typing import Any

from radq.hosts.batching import FIGURE_NAMES, Sums
from radq.hosts.details import PackedRow
from radq.hosts.vllm import PROCESSORS


class GuideWorker:
    """An extension of vLLM's worker."""

    def radq_take(self, ticket: str) -> Sums | None:
        """Return the figures of one request, and forget them."""
        taken = [(processor.answers, processor.steerer.figures.take(ticket)) for processor in PROCESSORS]
        return next((sums for answers, sums in taken if answers and sums is not None), None)

    def radq_totals(self) -> Sums:
        every = [processor.steerer.figures.totals for processor in PROCESSORS if processor.answers]
        return {name: sum(totals[name] for totals in every) for name in FIGURE_NAMES}

    def radq_bytes(self) -> int:
        return sum(processor.steerer.nbytes for processor in PROCESSORS)

    def radq_facts(self) -> dict[str, Any] | None:
        """Return the ranges of the guides' rewards, and whether there are details of tokens.

        The server describes itself with these facts. They are None if this worker has no guides.
        """
        for processor in PROCESSORS:
            return {"ranges": processor.steerer.loaded.reward_ranges(), "details": processor.tells_details}
        return None

    def radq_details(self, ticket: str) -> list[PackedRow]:
        """Return the candidates of a request's tokens since the last call, and forget them."""
        taken = [(processor.answers, processor.steerer.records.take(ticket)) for processor in PROCESSORS]
        return [row for answers, rows in taken if answers for row in rows]

    def radq_score(self, token_ids: Sequence[int]) -> dict[str, list[float]] | None:
        """Return the reward of each token of a text, by the name of each guide; None if this worker has no guides."""
        return next((processor.steerer.loaded.token_rewards(token_ids) for processor in PROCESSORS), None)
