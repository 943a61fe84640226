"""radq generate --base gpt2 --guide DIR:toxicity=-50 --prompt TEXT: continue prompts, steered or not."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from radq.decoding.config import DEFAULT_KL_BUDGET, Ends

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from radq.decoding.config import LogitChanges, Steering
    from radq.decoding.generate import Generation
    from radq.guides.spec import GuideSpec
    from radq.sources.model_source import ModelSource

KL_BUDGET = (
    "Largest KL divergence per token, in nats, between steered and unsteered distribution; β is scaled down to it, so "
    "that a β which is too large for a guide does not break sentences. none leaves β as it is. "
    f"auto is {DEFAULT_KL_BUDGET:g}, or the budget with which the strengths of --guide were calibrated."
)


@dataclass
class Arguments:
    """Continue prompts with a language model, steered by reward models or by the experts of DExperts or GeDi."""

    base: str = "embedded"
    """Language model to steer: a hub name, a folder, or embedded, which is SmolLM2-135M-Instruct from a pip package."""
    guide: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="DIR:ATTR=BETA,…")] = field(
        default_factory=list
    )
    """Folder of a reward model, with a strength β for one or more of its attributes; a negative β steers away.
    embedded:sentiment and embedded:toxicity come with radq. A number is always β; attributes that `radq calibrate` has
    measured, as these two, also take weak, medium, strong or 60%.
    Folders of `radq train-experts` are written DIR:alpha=2 (DExperts) or DIR:omega=30 (GeDi, which also takes filter_p,
    target_p and prior).
    Repeat the option to add guides; without it, the language model is not steered."""
    prompt: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = field(default_factory=list)
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
    samples: int = 1
    """Number of continuations of each prompt."""
    max_new_tokens: int = 20
    """Largest number of tokens of a continuation."""
    stop: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = field(default_factory=list)
    """Text that ends a continuation before it; repeat the option for more texts."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that a text already has become less likely, before rewards are added; 1 changes nothing."""
    compile: bool = False
    """Compile the models first, which takes a minute or so; small models on a GPU then decode up to twice as fast."""
    batch_size: int | None = None
    """Number of continuations that are decoded together; by default as many as fit into free memory."""
    stream: bool = False
    """Print one continuation of each prompt as it is written, instead of a table at the end."""
    seed: int = 0
    """Seed of the random numbers: the same seed gives the same texts."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16"] = "auto"
    """Data type of all models; auto uses the one in which their files are stored, or float32 on a CPU that has no
    instructions for it. fastest tries data types and numbers of threads for a second; texts may then differ from one
    machine to another."""
    json: bool = False
    """Print the texts and their numbers as JSON."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce, print_json
    from radq.sources.model_source import ModelSource

    base = ModelSource.find(arguments.base)
    prompts, specifications = _check(arguments, base)
    announce(f"loading {' and '.join([arguments.base, *arguments.guide])}", arguments.json)
    from radq.decoding.generate import generate
    from radq.guides.spec import load_guides
    from radq.models.loading import choose_dtype, find_device, load
    from radq.numerics import require_memory_for_texts

    require_memory_for_texts(len(prompts) * arguments.samples, arguments.max_new_tokens, "give a smaller --samples.")
    device = find_device(arguments.device)
    dtype = choose_dtype(arguments.dtype, base, device)
    lm, tokenizer = load(base, device, dtype)
    guide = load_guides(specifications, device, dtype, arguments.clamp, lm)
    steering = _steering(arguments, specifications)
    if arguments.stream:
        _print_streams(arguments, prompts, lm, tokenizer, guide, steering)
        return
    generations = generate(
        lm,
        tokenizer,
        prompts,
        guide,
        top_k=arguments.top_k or None,
        top_p=arguments.top_p,
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
        samples=arguments.samples,
        seed=arguments.seed,
        kl_budget=steering.kl_budget,
        ends=arguments.ends,
        stop=arguments.stop,
        batch_size=arguments.batch_size,
        changes=_changes(arguments),
        compile=arguments.compile,
        progress=not arguments.json,
    )
    if arguments.json:
        print_json({"generations": [asdict(generation) for generation in generations]})
    else:
        _print_table(generations, tokenizer)


def _print_streams(
    arguments: Arguments, prompts: list[str], lm: Any, tokenizer: Any, guide: Any, steering: "Steering"
) -> None:
    """Print a continuation of each prompt while it is written; the same texts as without --stream."""
    from radq.decoding.generate import stream_text

    for number, prompt in enumerate(prompts):
        print(prompt, end="", flush=True)
        pieces = stream_text(
            lm,
            tokenizer,
            prompt,
            guide,
            steering,
            arguments.max_new_tokens,
            arguments.seed,
            stop=arguments.stop,
            changes=_changes(arguments),
            compile=arguments.compile,
            first_prompt=number,
        )
        for piece in pieces:
            print(piece, end="", flush=True)
        print()


def _steering(arguments: Arguments, specifications: "Sequence[GuideSpec]") -> "Steering":
    from radq.decoding.config import Steering, read_budget
    from radq.guides.spec import find_budget

    asked = arguments.kl_budget
    budget = find_budget(specifications, DEFAULT_KL_BUDGET) if asked == "auto" else read_budget(asked)
    return Steering(arguments.top_k or None, arguments.top_p, arguments.temperature, budget, arguments.ends)


def _changes(arguments: Arguments) -> "LogitChanges":
    from radq.decoding.config import LogitChanges

    return LogitChanges(repetition_penalty=arguments.repetition_penalty)


def _check(arguments: Arguments, base: "ModelSource") -> "tuple[list[str], list[GuideSpec]]":
    """Refuse what can be refused before torch is imported; return the prompts and guides."""
    from radq.decoding.config import check_counts, check_stop
    from radq.errors import OptionError
    from radq.guides.spec import GuideSpec
    from radq.sources.model_source import check_language_model

    prompts = _read_prompts(arguments)
    specifications = [GuideSpec.parse(text, base) for text in arguments.guide]
    _steering(arguments, specifications)
    counts = {"max_new_tokens": arguments.max_new_tokens, "samples": arguments.samples}
    check_counts(**counts, **({} if arguments.batch_size is None else {"batch_size": arguments.batch_size}))
    check_stop(arguments.stop)
    _changes(arguments)
    if arguments.stream and (arguments.json or arguments.samples > 1):
        other = "--json" if arguments.json else f"--samples {arguments.samples}"
        raise OptionError(f"--stream prints one text of each prompt, and {other} is given.", "give one of the two.")
    for specification in specifications:
        specification.check()
    check_language_model(base)
    return prompts, specifications


def _read_prompts(arguments: Arguments) -> list[str]:
    from radq.data.prompts import read_prompts
    from radq.errors import OptionError

    prompts = list(arguments.prompt)
    if arguments.prompts is not None:
        prompts += [prompt.text for prompt in read_prompts(arguments.prompts)]
    if not prompts:
        raise OptionError("there is no prompt.", "give --prompt TEXT, or --prompts FILE with one per line.")
    return prompts


def _print_table(generations: "list[Generation]", tokenizer: "PreTrainedTokenizerBase") -> None:
    from rich.table import Table

    from radq.commands.console import console
    from radq.report.tokens import coloured, legend, split_tokens

    shifts = [shift for generation in generations for shift in generation.shifts]
    # Around the mean, since a number that is added to the logits of all candidates changes nothing.
    mean = sum(shifts) / len(shifts)
    reach = max(abs(shift - mean) for shift in shifts)
    low, high = mean - reach, mean + reach
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
    if reach > 0:
        added = f"{min(shifts):.3g} to {max(shifts):.3g}, on average {mean:.3g}"
        console().print(legend(low, high, f"the guide added {added}, to the logits of these tokens"))
