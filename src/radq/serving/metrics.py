"""The figures of a server, for Prometheus."""

import time
from collections.abc import Callable
from typing import Any

from radq.errors import require_package
from radq.registry.details import Drawn
from radq.serving.texts import Text

FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
NATS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        prometheus = require_package("prometheus_client", "serve")
        self._prometheus = prometheus
        self.registry = prometheus.CollectorRegistry()

        def make(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
            return kind(name, text, labels, registry=self.registry, **options)

        counter, histogram, gauge = prometheus.Counter, prometheus.Histogram, prometheus.Gauge
        self.requests = make(counter, "radq_requests", "requests that were answered", ("route", "status"))
        self.prompt_tokens = make(counter, "radq_prompt_tokens", "tokens of prompts that were read")
        self.tokens = make(counter, "radq_tokens", "tokens that were drawn", ("guided",))
        self.first = make(histogram, "radq_time_to_first_token_seconds", "from request to token", buckets=FAST)
        self.step = make(histogram, "radq_time_per_token_seconds", "seconds of a step", buckets=FAST)
        self.kl = make(histogram, "radq_kl_nats", "KL(guided, unguided) of guided tokens, in nats", buckets=NATS)
        self.step_seconds = make(counter, "radq_step_seconds", "seconds of all steps")
        self.guide_seconds = make(counter, "radq_guide_seconds", "seconds of them that guides took, on a CPU")
        self.cancelled = make(counter, "radq_cancelled_texts", "texts whose client went away")
        self._queue = make(gauge, "radq_waiting_texts", "texts that wait for their turn")
        self._running = make(gauge, "radq_running_texts", "texts that are decoded now")
        self._memory = make(gauge, "radq_cache_bytes", "keys and values of the texts that are decoded now")

    def watch(self, waiting: Callable[[], int], running: Callable[[], int], nbytes: Callable[[], int]) -> None:
        """Let the gauges show what these functions return when the figures are asked for."""
        self._queue.set_function(waiting)
        self._running.set_function(running)
        self._memory.set_function(nbytes)

    def count_step(self, seconds: float, of_guide: float) -> None:
        self.step.observe(seconds)
        self.step_seconds.inc(seconds)
        self.guide_seconds.inc(of_guide)

    def count_tokens(self, text: Text, tokens: list[Drawn], first: bool) -> None:
        self.tokens.labels("yes" if text.selection.guides else "no").inc(len(tokens))
        if first:
            self.first.observe(time.perf_counter() - text.arrived)
            self.prompt_tokens.inc(len(text.prompt))
        if text.selection.guides:
            for token in tokens:
                self.kl.observe(token.kl)

    def write(self) -> bytes:
        """Write the figures in the text format of Prometheus."""
        return self._prometheus.generate_latest(self.registry)
