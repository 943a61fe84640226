"""vLLM's second model runner with guides: the greedy tokens of our own loop, with its own kernels and its own drafts.

On a machine with a GPU, vLLM runs there if RADQ_TEST_GPU is set. Otherwise Triton's interpreter computes its kernels,
see `second_runner`.
"""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
from second_runner import run_job
from vllm_world import NEW_TOKENS, PROMPTS, TOKENIZER, World

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: radq[vllm]"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed."),
]
DRAFTS = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
REPEATING = ["5 9 5 9 5 9 5", "7 8 7 8 7 8 7 8 7"]  # texts whose drafts are sometimes right


@pytest.fixture(scope="module", params=["llama"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(request.param, tmp_path_factory.mktemp("vllm"))


def make_requests(world: World, kinds: list[str], prompts: list[str], seed: int) -> list[dict[str, Any]]:
    """Guided requests of different strengths and unguided ones, which come and go at different steps."""
    rng, requests = random.Random(seed), []
    for number, prompt in enumerate(prompts * 2):
        kind = ([*kinds, None])[number % (len(kinds) + 1)]
        nice, rude = rng.choice([4, -7, 9.5]), rng.choice([-6, 3])
        requests.append(
            {
                "step": rng.randrange(8),
                "prompt": TOKENIZER(prompt).input_ids,
                "text": prompt,
                "guide": kind and f"{world.guides[kind].rpartition(':')[0]}:nice={nice},rude={rude}",
                "arguments": kind and {"radq": {f"{kind}.0": nice, f"{kind}.1": rude, "kl_budget": None, "top_k": 6}},
                "stops": [3, 9] if number % 4 == 1 else [],
                "max_tokens": rng.choice([5, NEW_TOKENS]),
                "cancelled_after": rng.choice([None, None, None, 6]),
            }
        )
    return requests


def check(world: World, answer: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    """Each text is that of `radq.generate` alone; one that was cancelled is its beginning."""
    assert answer["runner"] in ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.cpu.model_runner")
    assert answer["failed"] == 0
    for request, found in zip(requests, answer["texts"], strict=True):
        options = {"max_new_tokens": request["max_tokens"], "stop_token_ids": request["stops"]}
        (expected,) = world.own(request["guide"], [request["text"]], **options)
        assert len(found) >= min(request["cancelled_after"] or NEW_TOKENS, len(expected))
        assert found == expected[: len(found)], request
    assert len({str(text) for text in answer["texts"]}) > len(requests) // 2


def make_job(world: World, kinds: list[str], requests: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    tight: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 6}
    guides = {kind: world.guides[kind] for kind in kinds}
    return {"base": str(world.base), "guides": guides, "options": tight | options, "requests": requests}


def test_requests_come_and_go_and_have_the_tokens_of_our_own_loop(world: World, tmp_path: Path) -> None:
    """Prompts are read in pieces, and there is so little room that long texts are preempted and come back."""
    kinds = ["q", "v", "last", "layers"]
    requests = make_requests(world, kinds, PROMPTS, seed=0)
    little: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 5}
    little |= {"max_num_batched_tokens": 12, "enable_chunked_prefill": True}
    answer = run_job(make_job(world, kinds, requests, **little), tmp_path)
    check(world, answer, requests)
    assert answer["preempted"] > 0


def test_drafts_are_accepted_and_rejected_by_guided_logits(world: World, tmp_path: Path) -> None:
    kinds = ["q", "last", "layers"]
    requests = make_requests(world, kinds, [*PROMPTS, *REPEATING], seed=1)
    pieces: dict[str, Any] = {"max_num_batched_tokens": 30, "enable_chunked_prefill": True}
    answer = run_job(make_job(world, kinds, requests, speculative_config=DRAFTS, **pieces), tmp_path)
    check(world, answer, requests)
    assert 0 < answer["accepted"] < answer["drafted"]
