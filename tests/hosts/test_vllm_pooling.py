"""A RAD-V as a token classifier inside vLLM's pooling runner: its scores are the rewards of the tokens."""

import importlib.util
from pathlib import Path

import pytest
import torch
from vllm_world import PROMPTS, TOKENIZER, World

from radq.models.convert import save_token_classifier
from radq.models.kinds import RadV
from radq.models.reward import RewardModel

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: radq[vllm]"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_scores_are_the_rewards_of_tokens(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    World("llama", tmp_path)
    model = RewardModel.from_pretrained(tmp_path / "v", dtype=torch.float32)
    assert isinstance(model, RadV)
    model.config.loss = loss
    save_token_classifier(model, tmp_path / "classifier")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    llm = LLM(str(tmp_path / "classifier"), runner="pooling", dtype="float32", enforce_eager=True, max_model_len=64)
    found = llm.encode(PROMPTS, pooling_task="token_classify", use_tqdm=False)
    for prompt, scores in zip(PROMPTS, found, strict=True):
        ids = TOKENIZER(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            expected = model.token_rewards(ids)[0]
        torch.testing.assert_close(scores.outputs.data[1:], expected, rtol=1e-3, atol=1e-4)
