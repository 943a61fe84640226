"""radq generate --base gpt2 --guide DIR:toxicity=-50 --prompt TEXT: continue prompts, steered or not."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from radq.commands import AsJson, Base, Device, Guides, Texts
from radq.commands.console import announce, console, print_json
from radq.data.prompts import read_prompts
from radq.decoding.config import DEFAULT_KL_BUDGET, Ends, LogitChanges, Steering, check_stop, read_budget
from radq.errors import OptionError
from radq.guides.spec import GuideSpec, find_budget
from radq.settings import COUNT
from radq.sources.model_source import ModelSource, check_language_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from radq.decoding.generate import Generation

KL_BUDGET = (
    "Largest KL divergence per token, in nats, between steered and unsteered distribution; β is scaled down to it, so "
    "that a β which is too large for a guide does not break sentences. none leaves β as it is. "
    f"auto is {DEFAULT_KL_BUDGET:g}, or the budget with which the strengths of --guide were calibrated."
)


@dataclass
class Arguments:
    """Continue prompts with a language model, steered by reward models or by the experts of DExperts or GeDi."""

    base: Base = "embedded"
    guide: Guides = field(default_factory=list)
    """Folder of a reward model, with a strength β for one or more of its attributes; a negative β steers away.
    embedded:sentiment and embedded:toxicity come with radq. A number is always β; attributes that `radq calibrate` has
    measured, as these two, also take weak, medium, strong or 60%.
    Folders of `radq train-experts` are written DIR:alpha=2 (DExperts) or DIR:omega=30 (GeDi, which also takes filter_p,
    target_p and prior).
    Repeat the option to add guides; without it, the language model is not steered."""
    prompt: Texts = field(default_factory=list)
    """Text to continue; repeat the option for more texts. With an empty text the model starts from its BOS token."""
    prompts: str | None = None
    """File of prompts, one per line, or with a column prompt or text (csv, tsv, jsonl, parquet, also compressed). Blank
    lines are skipped."""
    top_k: int = 20
    """Choose each token among the k that are most likely without steering; 0 takes the whole vocabulary."""
    top_p: float | None = None
    """Choose each token among the most likely ones that together hold this probability, also within the top k."""
    temperature: float = 1.0
    """Divide the logits of the language model by this number, but not the rewards; 0 always takes the best token."""
    kl_budget: Annotated[float | Literal["auto", "none"], tyro.conf.arg(help=KL_BUDGET)] = "auto"
    ends: Ends = "base"
    """Stop tokens keep the probability that the language model gives them (base), so that guides decide what is said,
    not when it ends; or guides reward them like words (taught), which is for models that were taught ends."""
    clamp: bool = True
    """Clamp rewards to the range of the labels that the reward model was trained on."""
    samples: Annotated[int, COUNT] = 1
    """Number of continuations of each prompt."""
    max_new_tokens: Annotated[int, COUNT] = 20
    """Largest number of tokens of a continuation."""
    stop: Texts = field(default_factory=list)
    """Text that ends a continuation before it; repeat the option for more texts."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that a text already has become less likely, before rewards are added; 1 changes nothing."""
    compile: bool = False
    """Compile the models first, which takes a minute or so; small models on a GPU then decode up to twice as fast."""
    batch_size: Annotated[int | None, COUNT] = None
    """Number of continuations that are decoded together; by default as many as fit into free memory."""
    stream: bool = False
    """Print one continuation of each prompt as it is written, instead of a table at the end."""
    seed: int = 0
    """Seed of the random numbers: the same seed gives the same texts."""
    device: Device = "auto"
    dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16"] = "auto"
    """Data type of all models; auto uses the one in which their files are stored, or float32 on a CPU that has no
    instructions for it. fastest tries data types and numbers of threads for a second; texts may then differ from one
    machine to another."""
    json: AsJson = False


def run(arguments: Arguments) -> None:
    prompts = _read_prompts(arguments)
    base, specifications = check_guides(arguments.base, arguments.guide)
    budget = choose_budget(arguments.kl_budget, specifications)
    steering = Steering(arguments.top_k or None, arguments.top_p, arguments.temperature, budget, arguments.ends)
    changes = LogitChanges(repetition_penalty=arguments.repetition_penalty)
    check_stop(arguments.stop)
    if arguments.stream and (arguments.json or arguments.samples > 1):
        other = "--json" if arguments.json else f"--samples {arguments.samples}"
        raise OptionError(f"--stream prints one text of each prompt, and {other} is given.", "give one of the two.")
    announce(f"loading {' and '.join([arguments.base, *arguments.guide])}", arguments.json)
    from radq.decoding.generate import generate, stream_text
    from radq.guides.spec import load_guides
    from radq.models.loading import choose_dtype, find_device, load
    from radq.numerics import require_memory_for_texts

    require_memory_for_texts(len(prompts) * arguments.samples, arguments.max_new_tokens, "give a smaller --samples.")
    device = find_device(arguments.device)
    dtype = choose_dtype(arguments.dtype, base, device)
    lm, tokenizer = load(base, device, dtype)
    guide = load_guides(specifications, device, dtype, arguments.clamp, lm)
    options: dict[str, Any] = {"stop": arguments.stop, "changes": changes, "compile": arguments.compile}
    options |= {"max_new_tokens": arguments.max_new_tokens, "seed": arguments.seed}
    if arguments.stream:  # the same texts as without --stream
        for number, prompt in enumerate(prompts):
            print(prompt, end="", flush=True)
            for piece in stream_text(lm, tokenizer, prompt, guide, steering, first_prompt=number, **options):
                print(piece, end="", flush=True)
            print()
        return
    options |= {"samples": arguments.samples, "batch_size": arguments.batch_size, "progress": not arguments.json}
    generations = generate(lm, tokenizer, prompts, guide, **vars(steering), **options)
    if arguments.json:
        print_json({"generations": [asdict(generation) for generation in generations]})
    else:
        _print_table(generations, tokenizer)


def _read_prompts(arguments: Arguments) -> list[str]:
    prompts = list(arguments.prompt)
    if arguments.prompts is not None:
        prompts += [prompt.text for prompt in read_prompts(arguments.prompts)]
    if not prompts:
        raise OptionError("there is no prompt.", "give --prompt TEXT, or --prompts FILE with one per line.")
    return prompts


def check_guides(base: str, texts: Sequence[str]) -> tuple[ModelSource, list[GuideSpec]]:
    """Find a language model and the guides that are to steer it; refuse what cannot be loaded."""
    source = ModelSource.find(base)
    guides = [GuideSpec.parse(text, source) for text in texts]
    for guide in guides:
        guide.check()
    check_language_model(source)
    return source, guides


def choose_budget(asked: float | Literal["auto", "none"], guides: Sequence[GuideSpec]) -> float | None:
    """The KL budget that the option --kl-budget asks for."""
    return find_budget(guides, DEFAULT_KL_BUDGET) if asked == "auto" else read_budget(asked)


def _print_table(generations: "list[Generation]", tokenizer: "PreTrainedTokenizerBase") -> None:
    from rich.table import Table
    from rich.text import Text

    from radq.report.tokens import coloured, legend, split_tokens

    shifts = [shift for generation in generations for shift in generation.shifts]
    # Around the mean, since a number that is added to the logits of all candidates changes nothing.
    mean = sum(shifts) / len(shifts)
    reach = max(abs(shift - mean) for shift in shifts)
    low, high = mean - reach, mean + reach
    table = Table(show_lines=True)
    table.add_column("prompt", ratio=1, overflow="fold")
    table.add_column("continuation", ratio=2, overflow="fold")
    for column in ("KL/token", "clipped"):
        table.add_column(column, justify="right", no_wrap=True)
    for generation in generations:
        pieces = split_tokens(tokenizer, generation.token_ids)
        text = coloured(zip(pieces, generation.shifts, strict=True), low, high)
        table.add_row(Text(generation.prompt), text, f"{generation.kl:.3f}", f"{generation.clipped:.0%}")
    console().print(table)
    if reach > 0:
        added = f"{min(shifts):.3g} to {max(shifts):.3g}, on average {mean:.3g}"
        console().print(legend(low, high, f"the guide added {added}, to the logits of these tokens"))
