"""Prompts with their log-probabilities, as evaluation harnesses ask for them."""

import json
from typing import Any

import httpx
import pytest
import torch
from serving import Running

import radq
from radq.decoding.prompt_scores import PromptScores

PROMPTS = ["the film was good", "this plot seemed dull and the film"]


def ask(running: Running, **fields: Any) -> httpx.Response:
    body = {"echo": True, "logprobs": 1, "max_tokens": 0, "prompt": PROMPTS} | fields
    return httpx.post(f"{running.address}/v1/completions", json=body, timeout=60)


def log_p(running: Running, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of all tokens after each token of a text."""
    with torch.no_grad():
        return running.served.lm(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


def encode(running: Running, prompt: str) -> list[int]:
    return running.served.tokenizer(prompt).input_ids


def test_prompts_have_the_log_probabilities_of_the_base_model(running: Running) -> None:
    answer = ask(running, logprobs=3).json()
    show = running.served.show_token
    for prompt, choice in zip(PROMPTS, answer["choices"], strict=True):
        ids, columns = encode(running, prompt), choice["logprobs"]
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        assert columns["tokens"] == [show(token) for token in ids]
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
        numbers = log_p(running, ids)[:-1]
        own = numbers.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert columns["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
        for place, best in enumerate(columns["top_logprobs"][1:]):
            values, tokens = numbers[place].topk(3)
            names = [*map(show, tokens.tolist()), show(ids[place + 1])]
            assert set(best) == set(names)
            assert [best[name] for name in names[:3]] == pytest.approx(values.tolist(), abs=1e-4)
        ends = [*columns["text_offset"][1:], len(prompt)]
        pieces = [prompt[begin:end] for begin, end in zip(columns["text_offset"], ends, strict=True)]
        assert [piece.strip() for piece in pieces] == [token.strip() for token in columns["tokens"]]
        assert "prompt_logprobs" not in choice["radq"]
    assert answer["usage"]["completion_tokens"] == 0


def test_guided_ones_are_those_of_the_guides(running: Running) -> None:
    served = running.served
    answer = ask(running, radq={"praise": 10, "length": 3, "kl_budget": None}, top_k=30).json()
    folders = [served.config.guides[name].folder for name in ("praise", "length")]
    guide = radq.load_guide(f"{folders[0]}:praise=10") + radq.load_guide(f"{folders[1]}:length=3")
    ids = [encode(running, prompt) for prompt in PROMPTS]
    scores = PromptScores(
        served.lm, guide, ids, radq.Steering(30, kl_budget=None), guide.beta, [served.tokenizer.eos_token_id]
    )
    assert scores.go_on(10_000)
    for choice, expected in zip(answer["choices"], scores.guided, strict=True):
        found = choice["radq"]["prompt_logprobs"]
        assert found[0] is None
        likely = [number if number > -9999 else -float("inf") for number in found[1:]]
        assert likely == pytest.approx(expected[1:], abs=1e-4)
        assert likely != pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-2)


def test_an_evaluation_harness_reads_log_likelihoods(running: Running) -> None:
    """The request and the reading of lm-evaluation-harness: token ids in batches, one token more, the last left out."""
    batch = [encode(running, prompt) for prompt in PROMPTS]
    ends = [2, 3]
    for seed in range(4):  # the token that is drawn may be a stop token
        settings = {"temperature": 1, "max_tokens": 1, "logprobs": 1, "seed": seed}
        answer = ask(running, prompt=batch, **settings).json()
        for choice, ids, begin in zip(answer["choices"], batch, ends, strict=True):
            columns = choice["logprobs"]
            likelihood = sum(columns["token_logprobs"][begin:-1])
            greedy = all(
                token == max(top.values())
                for token, top in zip(
                    columns["token_logprobs"][begin:-1], columns["top_logprobs"][begin:-1], strict=True
                )
            )
            numbers = log_p(running, ids)[begin - 1 : -1]
            own = numbers.gather(1, torch.tensor(ids[begin:])[:, None])
            assert likelihood == pytest.approx(float(own.sum()), abs=1e-4)
            assert greedy == bool((numbers.argmax(-1) == torch.tensor(ids[begin:])).all())


def test_texts_follow_their_prompts(running: Running) -> None:
    settings: dict[str, Any] = {"max_tokens": 6, "seed": 1, "n": 2, "prompt": PROMPTS, "radq": {"praise": 5}}
    plain = ask(running, **settings, echo=False, logprobs=None).json()["choices"]
    for logprobs in (None, 0, 2):
        whole = ask(running, **settings, logprobs=logprobs).json()["choices"]
        assert [one["text"] for one in whole] == [PROMPTS[one["index"] // 2] + one["text"] for one in plain]
        lines = ask(running, **settings, logprobs=logprobs, stream=True).text.splitlines()
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        for choice in whole:
            own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
            assert "".join(chunk["text"] for chunk in own) == choice["text"]
            if logprobs is None:
                continue
            columns = choice["logprobs"]
            assert len({len(values) for values in columns.values() if values is not None}) == 1
            streamed = [number for chunk in own for number in chunk["logprobs"]["token_logprobs"]]
            assert streamed == pytest.approx(columns["token_logprobs"])
            assert own[-1]["radq"]["prompt_logprobs"] == pytest.approx(choice["radq"]["prompt_logprobs"])


def test_a_stream_of_a_prompt_alone(running: Running) -> None:
    lines = ask(running, prompt=PROMPTS[0], stream=True).text.splitlines()
    (chunk,) = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == (PROMPTS[0], "length")
    assert len(chunk["choices"][0]["logprobs"]["token_logprobs"]) == len(encode(running, PROMPTS[0]))


@pytest.mark.parametrize("fields", [{"echo": False}, {"echo": None}])
def test_no_tokens_without_a_prompt_to_tell(running: Running, fields: dict[str, Any]) -> None:
    answer = ask(running, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
