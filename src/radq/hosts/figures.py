"""Figures about guided tokens, which stand among the metrics of the server that radq runs in.

They are summed up on the device, and read now and then, so that no step waits for them.
"""

import logging
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LOGGER = logging.getLogger(__name__)
STEPS = 32  # between two readings
NAMES = {
    "tokens": "tokens that radq has guided",
    "kl": "sum over guided tokens of the KL divergence of the guided from the base distribution, in nats",
    "clipped": "sum over guided tokens of the share of candidates with a clamped reward",
    "failed": "guided steps of requests that could not be scored and end",
}


class Figures:
    """Sums over all guided tokens since the server has started."""

    def __init__(self, device: torch.device):
        self.totals = dict.fromkeys(NAMES, 0.0)
        self._sums = torch.zeros(len(NAMES), dtype=torch.float64, device=device)
        self._steps = 0
        self._counters = _make_counters()

    def count(self, kl: Float[Tensor, " b"], clipped: Float[Tensor, " b"], finite: Bool[Tensor, " b"]) -> None:
        """Count the tokens of a step."""
        fine = finite.double()
        sums = (fine.sum(), (kl * fine).sum(), (clipped * fine).sum(), (1 - fine).sum())
        self._sums += torch.stack(sums).to(self._sums)
        self._steps += 1
        if self._steps >= STEPS:
            self.read()

    def count_failure(self) -> None:
        """Count a request that ends since it could not be read."""
        self._add("failed", 1.0)

    def read(self) -> dict[str, float]:
        """Bring the totals up to date."""
        new = dict(zip(NAMES, self._sums.tolist(), strict=True))
        self._sums.zero_()
        self._steps = 0
        if new["failed"]:
            LOGGER.error("radq ends requests whose rewards are not finite; see the metric radq_failed.")
        for name, number in new.items():
            self._add(name, number)
        return self.totals

    def _add(self, name: str, number: float) -> None:
        self.totals[name] += number
        if name in self._counters:
            self._counters[name].inc(number)


_COUNTERS: dict[str, Any] = {}


def _make_counters() -> dict[str, Any]:
    """Counters of prometheus_client, one set for a process, where it is installed."""
    if not _COUNTERS:
        try:
            from prometheus_client import Counter
        except ImportError:
            return {}
        _COUNTERS.update({name: Counter(f"radq_{name}", text) for name, text in NAMES.items()})
    return _COUNTERS
