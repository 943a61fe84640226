"""A toy language model of film reviews, for first steps, documentation and tests. It trains in seconds, offline.

    python -m radq.toy FOLDER

The folder then holds a small transformers model and its tokenizer, on which every command of radq can be tried.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NOUNS = "film movie plot story cast ending music scene".split()
GOOD = "good great fine lovely bright moving".split()
BAD = "bad awful dull poor dark boring".split()
VERBS = "was is felt seemed".split()
WORDS = ["the", "this", "very", "really", "quite", "and", "but", ".", *NOUNS, *VERBS, *GOOD, *BAD]


def make_reviews(count: int, seed: int = 0) -> list[tuple[str, float]]:
    """Make random sentences, each with a label: the share of good words among its adjectives."""
    rng = random.Random(seed)

    def adjective(words: Sequence[str]) -> str:
        return rng.choice(["", "", "very ", "really ", "quite "]) + rng.choice(words)

    def review() -> tuple[str, float]:
        first, second = rng.choice([GOOD, BAD]), rng.choice([GOOD, BAD])
        link = "and" if first is second else "but"
        subject = f"{rng.choice(['the', 'this'])} {rng.choice(NOUNS)} {rng.choice(VERBS)}"
        text = f"{subject} {adjective(first)} {link} {adjective(second)} ."
        return text, ((first is GOOD) + (second is GOOD)) / 2

    return [review() for _ in range(count)]


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """Make a tokenizer with one token per word of the reviews."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<|endoftext|>", "<unk>", *(f"▁{w}" for w in WORDS)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<unk>"
    )


def make_toy(folder: str | Path, steps: int = 300) -> Path:
    """Train a two-layer GPT-2 on reviews and write it, with its tokenizer, to a folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from radq.numerics import pad_right
    from radq.sources.hub import quiet

    tokenizer = make_tokenizer()
    bos: Any = tokenizer.bos_token_id
    torch.manual_seed(0)
    shape: dict[str, Any] = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=bos, eos_token_id=bos, **shape))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    for step in range(steps):
        texts = [text for text, _ in make_reviews(32, seed=step)]
        input_ids, attention_mask = pad_right([[bos, *ids, bos] for ids in tokenizer(texts).input_ids])
        targets = input_ids.masked_fill(attention_mask == 0, -100)  # cross_entropy leaves out -100
        logits = lm(input_ids=input_ids).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with quiet():
        lm.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


if __name__ == "__main__":
    print(make_toy(sys.argv[1] if len(sys.argv) > 1 else "toy"))
