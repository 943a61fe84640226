"""The demonstration: texts of the embedded base model, unguided and guided at several β, scored and timed.

    models = load_demo_models()
    demonstration = compare(models, ATTRIBUTES["sentiment"])
    [(cell.beta, cell.score, cell.perplexity) for cell in demonstration.cells]

Unguided and guided texts have the same prompts, the same seed and the same batch size.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.decoding.generate import Generation, generate
from radq.decoding.text import encode_prompts
from radq.guides.reward import RewardGuide
from radq.judges.base import Judge
from radq.judges.models import LinearJudge
from radq.judges.readers import load_encoder
from radq.models.calibration import shipped_calibrations
from radq.models.loading import load
from radq.models.reward import RewardModel
from radq.numerics import pad_right
from radq.sources.embedded import EMBEDDED, judge_folder

NUM_TOKENS = 24  # the length of a continuation that does not stop by itself


@dataclass(frozen=True)
class Attribute:
    """An attribute of texts that the demonstration steers. β is signed: a negative one steers away from it."""

    name: str
    prompts: tuple[str, ...]
    judges_prompt: bool  # whether the judge reads the prompt too, as the paper's judge of this attribute does

    @property
    def betas(self) -> tuple[float, ...]:
        """The strengths that are compared: weak, medium and strong."""
        return tuple(shipped_calibrations()[self.name].named.values())

    @property
    def default_beta(self) -> float:
        return self.betas[-1]


ATTRIBUTES = {
    "sentiment": Attribute(
        "sentiment",
        ("The hotel that we booked was", "When I opened the box, I", "The new teacher at our school"),
        judges_prompt=True,
    ),
    "toxicity": Attribute(
        "toxicity",
        ("I was so angry that I called him a", "He turned around and shouted: you", "What I hate most about them is"),
        judges_prompt=False,
    ),
}


@dataclass(frozen=True)
class DemoModels:
    """The models of the demonstration: the base model, and a reward model and a judge for each attribute."""

    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rewards: dict[str, RewardModel]
    judges: dict[str, Judge]


@dataclass(frozen=True)
class DemoText:
    """A continuation with its score and the rewards of its tokens."""

    generation: Generation
    rewards: list[float]  # the reward of each token, also where the text is unguided
    score: float | None  # the judge's, from 0 to 1; None for a blank text


@dataclass(frozen=True)
class DemoCell:
    """All texts at one β, with means over them."""

    beta: float | None  # None: unguided
    texts: list[DemoText]  # in the order of the prompts, samples of a prompt together
    score: float | None  # the mean; None if all texts are blank
    perplexity: float  # of all their tokens, under the base model
    milliseconds: float  # per token


@dataclass(frozen=True)
class Demonstration:
    """Texts of one attribute, unguided and at several β."""

    attribute: Attribute
    judge: str  # its name
    cells: list[DemoCell]  # unguided first


def load_demo_models(device: str = "cpu") -> DemoModels:
    """Load the models. The first call on a machine converts the base model, which takes a quarter of a minute."""
    lm, tokenizer = load(EMBEDDED, device)
    rewards = {name: RewardModel.from_pretrained(f"{EMBEDDED}:{name}", device) for name in ATTRIBUTES}
    encoder = load_encoder(EMBEDDED, device)
    judges: dict[str, Judge] = {name: LinearJudge(judge_folder(name), device, encoder) for name in ATTRIBUTES}
    return DemoModels(lm, tokenizer, rewards, judges)


def compare(
    models: DemoModels,
    attribute: Attribute,
    prompts: Sequence[str] = (),
    betas: Sequence[float] = (),
    num_samples: int = 8,
    seed: int = 0,
    progress: bool = False,
) -> Demonstration:
    """Continue prompts unguided and at each β. Prompts and β are the attribute's own unless they are given."""
    prompts, betas = prompts or attribute.prompts, betas or attribute.betas
    reward, judge = models.rewards[attribute.name], models.judges[attribute.name]
    guides = {None: None} | {beta: RewardGuide(reward, {attribute.name: beta}) for beta in betas}

    def draw(beta: float | None, tokens: int = NUM_TOKENS) -> list[Generation]:
        options: dict[str, Any] = {"max_new_tokens": tokens, "samples": num_samples, "seed": seed}
        return generate(models.lm, models.tokenizer, prompts, guides[beta], **options)

    for beta in (None, betas[-1]):  # the first calls are slow, so they are not timed
        draw(beta, 3)
    cells = []
    for beta in tqdm([None, *betas], desc=attribute.name, unit="β", leave=False, disable=not progress):
        start = time.perf_counter()
        texts = draw(beta)
        seconds = time.perf_counter() - start
        read = [(text.prompt if attribute.judges_prompt else "") + text.text for text in texts]
        scores = [None if np.isnan(score) else float(score) for score in judge.score(read)]
        known = [score for score in scores if score is not None]
        rewards = token_rewards(models, reward, attribute.name, texts)
        tokens = sum(text.num_text_tokens for text in texts)
        cells.append(
            DemoCell(
                beta,
                [DemoText(*each) for each in zip(texts, rewards, scores, strict=True)],
                sum(known) / len(known) if known else None,
                math.exp(sum(text.nll for text in texts) / max(1, tokens)),
                1000 * seconds / sum(len(text.token_ids) for text in texts),
            )
        )
    return Demonstration(attribute, judge.name, cells)


@torch.no_grad()
def token_rewards(
    models: DemoModels, reward: RewardModel, attribute: str, texts: Sequence[Generation]
) -> list[list[float]]:
    """The reward of each generated token, clamped as for guidance."""
    prompts = encode_prompts(models.lm.config, models.tokenizer, [text.prompt for text in texts], NUM_TOKENS)
    rows = [prompt + text.token_ids for prompt, text in zip(prompts, texts, strict=True)]
    column = reward.config.attributes.index(attribute)
    rewards = reward.token_rewards(*pad_right(rows, device=reward.device))[..., column]  # (b, t)
    clamped = rewards.clamp(*reward.config.attribute_ranges[column]).tolist()
    return [values[len(p) : len(row)] for values, p, row in zip(clamped, prompts, rows, strict=True)]
