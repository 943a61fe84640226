"""The figures of a server, for Prometheus."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from radq.errors import require_package
from radq.guides.base import Guide
from radq.guides.meter import WatchedGuide
from radq.registry.details import DrawnToken
from radq.serving.parsed_request import ServedText

FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
NATS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        prometheus = require_package("prometheus_client", "serve")
        self._prometheus = prometheus
        self.registry = prometheus.CollectorRegistry()

        counter = partial(prometheus.Counter, registry=self.registry)
        histogram = partial(prometheus.Histogram, registry=self.registry)
        gauge = partial(prometheus.Gauge, registry=self.registry)
        self.requests = counter("radq_requests", "requests that were answered", ("route", "status"))
        self.prompt_tokens = counter("radq_prompt_tokens", "tokens of prompts that were read")
        self.tokens = counter("radq_tokens", "tokens that were drawn", ("guided",))
        self.first = histogram("radq_time_to_first_token_seconds", "from request to token", buckets=FAST)
        self.step = histogram("radq_time_per_token_seconds", "seconds of a step", buckets=FAST)
        self.kl = histogram("radq_kl_nats", "KL(guided, unguided) of guided tokens, in nats", buckets=NATS)
        self.step_seconds = counter("radq_step_seconds", "seconds of all steps")
        self.guide_seconds = counter("radq_guide_seconds", "seconds of them that guides took, on a CPU")
        self.cancelled = counter("radq_cancelled_texts", "texts whose client went away")
        self.waiting = gauge("radq_waiting_texts", "texts that wait for their turn")
        self.running = gauge("radq_running_texts", "texts that are decoded now")
        self.memory = gauge("radq_cache_bytes", "keys and values of the texts that are decoded now")

    def count_request(self, route: str, status: int) -> None:
        self.requests.labels(route, str(status)).inc()

    def count_step(self, seconds: float) -> None:
        self.step.observe(seconds)
        self.step_seconds.inc(seconds)

    def count_tokens(self, text: ServedText, tokens: list[DrawnToken], first: bool) -> None:
        self.tokens.labels("yes" if text.request.guides else "no").inc(len(tokens))
        if first:
            self.first.observe(time.perf_counter() - text.arrived)
            self.prompt_tokens.inc(len(text.request.prompt))
        if text.request.guides:
            for token in tokens:
                self.kl.observe(token.kl)

    def write(self) -> bytes:
        """Write the figures in the text format of Prometheus."""
        return self._prometheus.generate_latest(self.registry)


class ClockedGuide(WatchedGuide):
    """A guide that does what another does, and tells the seconds. On a GPU, work that is under way is not counted."""

    def __init__(self, guide: Guide, count: Callable[[float], None]):
        super().__init__(guide)
        self.count = count

    @contextmanager
    def watch(self, of_prompts: bool = False) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.count(time.perf_counter() - began)
