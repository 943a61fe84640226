"""Methods that vLLM's workers get by `--worker-extension-cls radq.hosts.vllm_worker.GuideWorker`.

vLLM's server lives in another process than the guides; it calls these methods to ask for figures.
"""

from radq.hosts.figures import NAMES, Sums
from radq.hosts.vllm import PROCESSORS


class GuideWorker:
    """An extension of vLLM's worker."""

    def radq_take(self, ticket: str) -> Sums | None:
        """The figures of one request, which are then forgotten."""
        found = [processor.figures.take(ticket) for processor in PROCESSORS]
        return next((sums for sums in found if sums is not None), None)

    def radq_totals(self) -> Sums:
        """The figures of all requests."""
        every = [processor.figures.totals for processor in PROCESSORS]
        return {name: sum(totals[name] for totals in every) for name in NAMES}

    def radq_bytes(self) -> int:
        """The memory that the guides' states may take up now."""
        return sum(processor.nbytes for processor in PROCESSORS)
