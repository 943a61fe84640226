"""Perplexity equals a token-by-token computation, whatever the padding and the batches."""

import numpy as np
import pytest
import torch
from families import FAMILIES, make_lm, make_number_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from radq.decoding.generate import generate
from radq.errors import ContextLengthError, OptionError
from radq.evaluation import perplexity
from radq.evaluation.metrics import perplexities
from radq.evaluation.perplexity import encode_pairs, measure_likelihoods
from radq.numerics import LOGITS_PER_FORWARD

PROMPTS = ["5 6 7", "8", "9 10 11 12 13 14", "5 6 7", ""]
LLAMA = make_lm("llama")
CONTINUATIONS = [" 20 21", " 22 23 24 25", " 26", " 30", " 31 32"]


def token_by_token(lm: PreTrainedModel, prompt: list[int], continuation: list[int]) -> float:
    """A forward for every token, in float64, without padding or cache."""
    total = 0.0
    for n, token in enumerate(continuation):
        with torch.no_grad():
            logits = lm(input_ids=torch.tensor([prompt + continuation[:n]]), use_cache=False).logits[0, -1]
        total -= float(logits.double().log_softmax(-1)[token])
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexity_equals_token_by_token_for_any_batch_size(family: str) -> None:
    lm, tokenizer = make_lm(family), make_number_tokenizer()
    prompts, continuations = ([[int(n) for n in text.split()] for text in texts] for texts in (PROMPTS, CONTINUATIONS))
    pairs = zip(prompts, continuations, strict=True)
    wanted = np.array([token_by_token(lm, prompt or [1], continuation) for prompt, continuation in pairs])
    for batch_size in (1, 2, 5):
        found = measure_likelihoods(lm, tokenizer, PROMPTS, CONTINUATIONS, batch_size=batch_size)
        assert found.tokens.tolist() == [2, 4, 1, 1, 2]
        assert found.truncated == 0
        np.testing.assert_allclose(found.nll, wanted, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(perplexities(found.nll, found.tokens), np.exp(wanted / found.tokens), rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(3, 36), max_size=9), st.lists(st.integers(3, 36), max_size=5)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 6),
)
def test_any_pairs_in_any_batches(pairs: list[tuple[list[int], list[int]]], batch_size: int) -> None:
    lm, tokenizer = LLAMA, make_number_tokenizer()
    prompts, texts = ([" ".join(map(str, pair[n])) for pair in pairs] for n in (0, 1))
    found = measure_likelihoods(lm, tokenizer, prompts, [f" {text}" for text in texts], batch_size)
    wanted = [token_by_token(lm, prompt or [1], text) for prompt, text in pairs]
    np.testing.assert_allclose(found.nll, wanted, rtol=1e-5, atol=1e-4)
    assert found.tokens.tolist() == [len(text) for _, text in pairs]


def test_full_memory_means_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, tokenizer, read = make_lm("gpt2"), make_number_tokenizer(), perplexity._measure_batch
    wanted = measure_likelihoods(lm, tokenizer, PROMPTS, CONTINUATIONS, batch_size=1)
    sizes = []

    def crowded(lm: PreTrainedModel, pairs: list[perplexity._Pair]) -> torch.Tensor:
        sizes.append(len(pairs))
        if len(pairs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return read(lm, pairs)

    monkeypatch.setattr(perplexity, "_measure_batch", crowded)
    with pytest.warns(UserWarning, match="2 texts at once from now on"):
        found = measure_likelihoods(lm, tokenizer, PROMPTS, CONTINUATIONS, batch_size=5)
    assert sizes == [5, 2, 2, 1]
    np.testing.assert_allclose(found.nll, wanted.nll, rtol=1e-5, atol=1e-4)


def test_batches_have_no_more_logits_than_memory_should_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, tokenizer = LLAMA, make_number_tokenizer()
    wanted = measure_likelihoods(lm, tokenizer, PROMPTS, CONTINUATIONS)
    sizes: list[int] = []
    original = perplexity._measure_batch

    def watched(lm: PreTrainedModel, pairs: list[perplexity._Pair]) -> torch.Tensor:
        sizes.append(len(pairs))
        return original(lm, pairs)

    monkeypatch.setattr(perplexity, "_measure_batch", watched)
    longest = 4 + 1  # tokens of a continuation, and the one before it
    monkeypatch.setitem(LOGITS_PER_FORWARD, "cpu", 2 * longest * lm.config.vocab_size)
    found = measure_likelihoods(lm, tokenizer, PROMPTS, CONTINUATIONS)
    assert sizes == [2, 2, 1]
    np.testing.assert_allclose(found.nll, wanted.nll, rtol=1e-6)
    monkeypatch.setitem(LOGITS_PER_FORWARD, "cpu", 1)  # one at a time is the least
    np.testing.assert_allclose(measure_likelihoods(lm, tokenizer, PROMPTS, CONTINUATIONS).nll, wanted.nll, rtol=1e-6)
    assert sizes[3:] == [1] * len(PROMPTS)


def test_a_blank_continuation_has_no_tokens() -> None:
    lm, tokenizer = make_lm("gpt2"), make_number_tokenizer()
    found = measure_likelihoods(lm, tokenizer, ["5 6"] * 3, ["", " 7 8", "  "])
    assert found.tokens.tolist() == [0, 2, 0]
    assert found.nll[[0, 2]].tolist() == [0, 0]
    assert found.nll[1] == pytest.approx(token_by_token(lm, [5, 6], [7, 8]), abs=1e-4)
    assert len(measure_likelihoods(lm, tokenizer, [], []).nll) == 0
    with pytest.raises(OptionError, match="in pairs, got 1 and 2"):
        measure_likelihoods(lm, tokenizer, ["5"], ["6", "7"])


def make_letter_tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    """Letters, and the pair "ab" as one token: a boundary may fall inside it."""
    vocabulary = {"<s>": 0, "a": 1, "b": 2, "c": 3, "ab": 4}
    letters = Tokenizer(models.BPE(vocabulary, merges=[("a", "b")]))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        letters.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="<s>")


def test_a_token_over_the_boundary_belongs_to_the_continuation() -> None:
    lm = make_lm("gpt2")

    def encode(prompt: str, continuation: str, bos: bool = False) -> tuple[list[int], list[int]]:
        pair = encode_pairs(lm, make_letter_tokenizer(bos), [prompt], [continuation])[0]
        return pair.prompt, pair.continuation

    assert encode("ca", "bc") == ([3], [4, 3])
    assert encode("cac", "bc") == ([3, 1, 3], [2, 3])
    assert encode("a", "b") == ([0], [4])  # nothing is left of the prompt: the BOS precedes
    assert encode("", "ab") == ([0], [4])
    assert encode("ca", "bc", bos=True) == ([0, 3], [4, 3])  # a tokenizer's own BOS comes once
    assert encode("", "ab", bos=True) == ([0], [4])
    assert encode("cc", "ccc") == ([3, 3], [3, 3, 3])


def test_what_is_too_long_loses_the_beginning_of_its_prompt() -> None:
    lm, tokenizer = make_lm("gpt2"), make_number_tokenizer()  # 64 positions
    long = " ".join(str(3 + n % 30) for n in range(80))
    found = measure_likelihoods(lm, tokenizer, [long, "5"], [" 7 8 9", " 7 8 9"])
    assert found.truncated == 1
    kept = [3 + n % 30 for n in range(80)][-61:]
    assert found.nll[0] == pytest.approx(token_by_token(lm, kept, [7, 8, 9]), abs=1e-3)
    with pytest.raises(ContextLengthError, match="less than 64 tokens.*got 80"):
        measure_likelihoods(lm, tokenizer, ["5"], [" " + long])


def test_an_impossible_token_is_infinitely_unlikely() -> None:
    lm, tokenizer = make_lm("gpt2"), make_number_tokenizer()
    with torch.no_grad():
        lm.lm_head = torch.nn.Linear(16, 37)
        lm.lm_head.bias[9] = -torch.inf
    found = measure_likelihoods(lm, tokenizer, ["5", "5"], [" 9", " 8"])
    assert np.isinf(found.nll).tolist() == [True, False]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_decoding_measures_the_perplexity_of_what_it_chooses(family: str) -> None:
    """Whatever temperature, candidates and stops: the numbers are those of the base alone."""
    lm, tokenizer = make_lm(family), make_number_tokenizer()
    texts = generate(lm, tokenizer, PROMPTS, top_k=8, temperature=0.7, max_new_tokens=5, samples=3, seed=1)
    for text in texts:
        prompt = [int(n) for n in text.prompt.split()] or [1]
        written = text.token_ids[: text.num_text_tokens]
        np.testing.assert_allclose(text.nll, token_by_token(lm, prompt, written), rtol=1e-5, atol=1e-4)


def test_a_stop_token_is_no_part_of_the_text() -> None:
    tokenizer, prompt = make_number_tokenizer(), PROMPTS[0]
    (whole,) = generate(LLAMA, tokenizer, [prompt], max_new_tokens=3, stop_token_ids=[])
    (text,) = generate(LLAMA, tokenizer, [prompt], max_new_tokens=3, stop_token_ids=whole.token_ids[1:2])
    assert (text.finish_reason, text.num_text_tokens) == ("stop", 1)
    ids = [int(n) for n in prompt.split()]
    np.testing.assert_allclose(text.nll, token_by_token(LLAMA, ids, whole.token_ids[:1]), rtol=1e-5, atol=1e-4)
