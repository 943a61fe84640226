"""Random requests from the server's own schema: never an error of the server, never a hang."""

import os
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from serving import Running

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is in radq[dev]")
EXAMPLES = int(os.environ.get("RADQ_EXAMPLES", "12"))


# Threads of the server draw random numbers meanwhile, for which hypothesis would blame the strategies.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_random_requests_never_fail_the_server(running: Running, mode: str) -> None:
    schema = schemathesis.openapi.from_url(f"{running.address}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 7
    statuses = set()

    def ask(case: Any) -> None:
        answer = case.call(base_url=running.address, timeout=60)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, answer.text

    wrong = mode == "NEGATIVE"  # which is possible where there is a body
    for operation in (one for one in operations if one.method == "post" or not wrong):
        strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])
        options = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        seed(0)(options(given(strategy)(ask)))()
    assert (400 if wrong else 200) in statuses
    assert httpx.get(f"{running.address}/health").status_code == 200
