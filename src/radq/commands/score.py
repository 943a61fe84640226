"""radq score --reward DIR --text "…" """

from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro


@dataclass
class Arguments:
    """Show the reward of every token of a text, given the tokens before it."""

    reward: str
    """Folder or hub name of the reward model; embedded:sentiment and embedded:toxicity come with radq."""
    text: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = field(default_factory=list)
    """Text to score; repeat the option for more texts."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    json: bool = False
    """Print the tokens and their rewards as JSON."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce, print_json
    from radq.models.stored import check_reward_model

    texts = _strip_texts(arguments.text)
    check_reward_model(arguments.reward)
    announce(f"loading {arguments.reward}", arguments.json)
    from radq.errors import ModelError
    from radq.models.loading import find_device
    from radq.models.reward import RewardModel

    model = RewardModel.from_pretrained(arguments.reward, find_device(arguments.device))
    if model.tokenizer is None:
        raise ModelError(f"{arguments.reward!r} has no tokenizer.", "copy the tokenizer files of its backbone into it.")
    scores = [score_text(model, text) for text in texts]
    if arguments.json:
        print_json({"attributes": model.config.attributes, "texts": scores})
    else:
        for score in scores:
            _print_score(score, dict(zip(model.config.attributes, model.config.attribute_ranges, strict=True)))


def _strip_texts(texts: list[str]) -> list[str]:
    """The texts without whitespace at the end; empty ones are refused."""
    from radq.errors import OptionError

    texts = [text.rstrip() for text in texts]
    if not texts or not all(texts):
        raise OptionError("text must not be empty." if texts else "there is no text to score.", "give --text TEXT.")
    return texts


def score_text(model: Any, text: str) -> dict[str, Any]:
    """The tokens of a text with their rewards, as they are printed as JSON."""
    import torch

    from radq.commands.console import split_tokens

    ids = model.tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        rewards = model.token_rewards(torch.tensor([ids], device=model.device))[0].tolist()  # (t, a)
    pieces = split_tokens(model.tokenizer, ids)
    tokens = [
        {"token": piece, "id": token, "rewards": dict(zip(model.config.attributes, reward, strict=True))}
        for piece, token, reward in zip(pieces, ids, rewards, strict=True)
    ]
    return {"text": text, "tokens": tokens}


def _print_score(score: dict[str, Any], ranges: dict[str, tuple[float, float]]) -> None:
    """Print a table of the rewards, and the text once per attribute. `ranges` are the lowest and highest rewards."""
    from rich.table import Table

    from radq.commands.console import coloured, console, legend

    table = Table()
    table.add_column("token")
    for attribute in ranges:
        table.add_column(attribute, justify="right")
    for token in score["tokens"]:
        rewards = token["rewards"]
        cells = [coloured([(f"{rewards[name]:.3f}", rewards[name])], *ranges[name]) for name in ranges]
        table.add_row(token["token"], *cells)
    console().print(table)
    for attribute, (low, high) in ranges.items():
        pieces = ((token["token"], token["rewards"][attribute]) for token in score["tokens"])
        console().print(coloured([(f"{attribute}: ", (low + high) / 2)], low, high) + coloured(pieces, low, high))
        console().print(legend(low, high, f"rewards from {low:g} to {high:g}"))
