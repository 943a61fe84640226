"""Texts that the base model writes itself, each with the score of its end: data for a reward model of values.

    python recipes/embedded/own_texts.py --prompts data/write-sentiment.jsonl --attribute sentiment --reads text \
        --scorers reward:models/sentiment-v --guide embedded:sentiment=35 --out data/own-sentiment.jsonl

A value is the score that a text is expected to end with if the base model goes on. Half of the texts are the base
model's own from the prompt on. Of the others, the first tokens are guided, one half by the guide and the other half by
its opposite, and the rest is the base model's own again, so that values are also known where guided texts lead.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from radq import generate, load
from radq.data.prompts import read_prompts
from radq.decoding.generate import Generation
from radq.decoding.text import encode_prompts
from radq.files import atomic_file
from radq.guides.spec import GuideSpec
from radq.judges.models import load_judge
from radq.models.loading import find_device

GUIDED_TOKENS = (4, 8, 12, 16)  # at the beginning of texts that are guided at all


def main() -> None:
    arguments = parse_arguments()
    device = find_device("auto")
    lm, tokenizer = load(arguments.base, device=device, dtype=arguments.dtype)
    prompts = [prompt.text for prompt in read_prompts(arguments.prompts)]
    guided = GuideSpec.parse(arguments.guide)
    writer = Writer(lm, tokenizer, arguments.tokens, arguments.batch_size, arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    drawn = [prompts[n] for n in rng.integers(len(prompts), size=arguments.number)]
    half = arguments.number // 2
    rows = writer.write(drawn[:half], None, 0)
    for sign, group in zip((1, -1), np.array_split(np.arange(half, arguments.number), 2), strict=True):
        numbers = {name: sign * strength for name, strength in guided.numbers.items()}
        guide = GuideSpec(guided.folder, numbers).load(device=device, dtype=arguments.dtype, lm=lm)
        for tokens, part in zip(GUIDED_TOKENS, np.array_split(group, len(GUIDED_TOKENS)), strict=True):
            rows += writer.write([drawn[n] for n in part], guide, tokens)
    rows = [(prompt, text) for prompt, text in rows if text.strip()]
    read = [prompt + text if arguments.reads == "text" else text for prompt, text in rows]
    scores = np.mean([load_judge(scorer, device).score(read) for scorer in arguments.scorers], axis=0)
    lines = [
        json.dumps({"text": prompt + text, arguments.attribute: round(float(score), 5)}) + "\n"
        for (prompt, text), score in zip(rows, scores, strict=True)
    ]
    with atomic_file(arguments.out) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")


class Writer:
    """Continues prompts, the first tokens under a guide and the others without one."""

    def __init__(self, lm, tokenizer, tokens: int, batch_size: int, seed: int):
        self.lm, self.tokenizer, self.tokens, self.batch_size, self.seed = lm, tokenizer, tokens, batch_size, seed
        self.written = 0  # texts: random numbers go on where they ended

    def write(self, prompts: Sequence[str], guide, guided_tokens: int) -> list[tuple[str, str]]:
        """Return each prompt with its continuation."""
        encoded = encode_prompts(self.lm.config, self.tokenizer, prompts, self.tokens)
        begun = self._continue(encoded, guide, guided_tokens, self.seed) if guided_tokens else []
        if begun:
            encoded = [ids + first.token_ids for ids, first in zip(encoded, begun, strict=True)]
        ended = self._continue(encoded, None, self.tokens - guided_tokens, self.seed + 1)
        self.written += len(prompts)
        firsts = [first.text for first in begun] or [""] * len(prompts)
        stopped = [first.finish_reason == "stop" for first in begun] or [False] * len(prompts)
        rests = ["" if stop else rest.text for stop, rest in zip(stopped, ended, strict=True)]
        return [(prompt, first + rest) for prompt, first, rest in zip(prompts, firsts, rests, strict=True)]

    def _continue(self, encoded: list[list[int]], guide, tokens: int, seed: int) -> list[Generation]:
        options = {"max_new_tokens": tokens, "seed": seed, "first_prompt": self.written, "batch_size": self.batch_size}
        return generate(self.lm, self.tokenizer, encoded, guide, kl_budget=None, **options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="embedded", help="language model that writes")
    parser.add_argument("--prompts", required=True, help="file with the prompts")
    parser.add_argument("--attribute", required=True, help="name of the column with the scores")
    parser.add_argument("--scorers", nargs="+", required=True, help="judges, as for radq eval; the score is their mean")
    parser.add_argument("--reads", choices=("text", "continuation"), default="text", help="what the judges read")
    parser.add_argument("--guide", required=True, help="guide of the first tokens, as for radq generate")
    parser.add_argument("--number", type=int, default=40_000, help="number of texts")
    parser.add_argument("--tokens", type=int, default=24, help="largest number of tokens after a prompt")
    parser.add_argument("--batch-size", type=int, default=6250, help="texts that are written together")
    parser.add_argument("--dtype", default="auto", help="data type of the base model and of the guide")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="jsonl file to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
