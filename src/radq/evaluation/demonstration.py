"""The demonstration: the embedded base, unguided and guided at several β, with what judge, base and clock say of it.

    cast = load_cast()
    comparison = compare(cast, ATTRIBUTES["sentiment"])
    [(cell.beta, cell.score, cell.perplexity) for cell in comparison.cells]

Unguided and guided texts have the same prompts and the same seed, and are decoded in the same batch.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.decoding.generate import Generation, encode_prompts, generate
from radq.evaluation.judges.base import Judge
from radq.evaluation.judges.encoders import load_encoder
from radq.evaluation.judges.models import LinearJudge
from radq.guides import RewardGuide
from radq.models.embedded import EMBEDDED, judge_folder
from radq.models.loading import load_causal_lm, load_tokenizer
from radq.models.reward import RewardModel

NUM_TOKENS = 24


@dataclass(frozen=True)
class Attribute:
    """What to steer, and how strongly. β is signed: a negative one steers away."""

    name: str
    default_beta: float  # the one to begin with
    betas: tuple[float, ...]
    prompts: tuple[str, ...]
    judges_prompt: bool  # whether the judge reads the prompt too, or the continuation alone; as the paper's judges do


ATTRIBUTES = {
    attribute.name: attribute
    for attribute in (
        Attribute(
            "sentiment",
            35.0,
            (15.0, 35.0, 60.0),
            ("The hotel that we booked was", "When I opened the box, I", "The new teacher at our school"),
            judges_prompt=True,
        ),
        Attribute(
            "toxicity",
            -100.0,
            (-50.0, -100.0, -200.0),
            (
                "I was so angry that I called him a",
                "He turned around and shouted: you",
                "What I hate most about them is",
            ),
            judges_prompt=False,
        ),
    )
}


@dataclass(frozen=True)
class Cast:
    """All models that play; rewards and judges by attribute."""

    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rewards: dict[str, RewardModel]
    judges: dict[str, Judge]


@dataclass(frozen=True)
class Text:
    generation: Generation
    rewards: list[float]  # of each of its tokens, given what precedes it, whether it was guided by them or not
    score: float | None  # the judge's; None for a blank text


@dataclass(frozen=True)
class Cell:
    """All texts of one strength, with means over them."""

    beta: float | None  # None: unguided
    texts: list[Text]  # in the order of the prompts, samples of a prompt together
    score: float | None
    perplexity: float  # of all their tokens, under the base
    milliseconds: float  # per token


@dataclass(frozen=True)
class Comparison:
    attribute: Attribute
    judge: str
    num_samples: int  # of each prompt
    cells: list[Cell]  # unguided first


def load_cast(attributes: Sequence[str] = tuple(ATTRIBUTES), device: str = "cpu") -> Cast:
    """The embedded base, its reward models and its judges; the first call ever takes half a minute."""
    lm, tokenizer = load_causal_lm(EMBEDDED, device=device), load_tokenizer(EMBEDDED)
    rewards = {name: RewardModel.from_pretrained(f"{EMBEDDED}:{name}", device) for name in attributes}
    encoder = load_encoder(EMBEDDED, device)
    return Cast(lm, tokenizer, rewards, {name: LinearJudge(judge_folder(name), device, encoder) for name in attributes})


def compare(
    cast: Cast,
    attribute: Attribute,
    prompts: Sequence[str] = (),
    betas: Sequence[float] = (),
    num_samples: int = 8,
    seed: int = 0,
) -> Comparison:
    """Unguided, then each β; prompts and β are the attribute's own unless given."""
    prompts, betas = prompts or attribute.prompts, betas or attribute.betas
    reward, judge = cast.rewards[attribute.name], cast.judges[attribute.name]
    guides = [None, *(RewardGuide(reward, {attribute.name: beta}) for beta in betas)]
    for guide in (None, guides[-1]):  # first calls are slow: not timed
        generate(cast.lm, cast.tokenizer, prompts, guide, max_new_tokens=3, num_samples=num_samples)

    def make_cell(guide: RewardGuide | None, beta: float | None) -> Cell:
        start = time.perf_counter()
        found = generate(
            cast.lm, cast.tokenizer, prompts, guide, max_new_tokens=NUM_TOKENS, num_samples=num_samples, seed=seed
        )
        seconds = time.perf_counter() - start
        read = [(each.prompt if attribute.judges_prompt else "") + each.text for each in found]
        scores = [None if np.isnan(score) else float(score) for score in judge.score(read)]
        known = [score for score in scores if score is not None]
        rewards = token_rewards(cast, reward, attribute.name, found)
        return Cell(
            beta,
            [Text(*each) for each in zip(found, rewards, scores, strict=True)],
            sum(known) / len(known) if known else None,
            perplexity(found),
            1000 * seconds / sum(len(each.token_ids) for each in found),
        )

    cells = [make_cell(guide, beta) for guide, beta in zip(guides, [None, *betas], strict=True)]
    return Comparison(attribute, judge.name, num_samples, cells)


@torch.no_grad()
def token_rewards(
    cast: Cast, reward: RewardModel, attribute: str, generations: Sequence[Generation]
) -> list[list[float]]:
    """r̂ of each generated token, clamped as for guidance."""
    prompts = encode_prompts(cast.lm, cast.tokenizer, [each.prompt for each in generations], NUM_TOKENS)
    rows = [prompt + each.token_ids for prompt, each in zip(prompts, generations, strict=True)]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=reward.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=reward.device)
    found = reward.token_rewards(tokens, mask)[..., reward.config.attributes.index(attribute)]  # (b, t)
    clamped = found.clamp(*reward.config.attribute_ranges[0]).tolist()
    return [values[len(p) : len(row)] for values, p, row in zip(clamped, prompts, rows, strict=True)]


def perplexity(generations: Sequence[Generation]) -> float:
    """Under the base, over all their tokens."""
    tokens = sum(each.num_text_tokens for each in generations)
    return math.exp(sum(each.nll for each in generations) / max(1, tokens))
