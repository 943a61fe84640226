"""radq choices --data questions.jsonl --guide DIR:toxicity=-50: does the guided model still know what it knew?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from radq.evaluation.choices import Question
    from radq.guides.spec import GuideSpec


@dataclass
class Arguments:
    """Answer multiple-choice questions with a language model, unguided and guided, and compare the accuracies."""

    data: Path
    """Questions (jsonl or parquet) with the fields question, choices and answer, which is the number of the right
    choice, from 0 on, or the choice itself."""
    base: str = "embedded"
    """Language model to steer: a hub name, a folder, or embedded."""
    guide: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="DIR:ATTR=BETA,…")] = field(
        default_factory=list
    )
    """Guide as in `radq generate`; repeat the option to add guides."""
    kl_budget: float | Literal["auto", "none"] = "auto"
    """Largest KL divergence per token, as in `radq generate`."""
    out: Path | None = None
    """Folder for the answers; the same command with the same folder goes on where it was stopped."""
    limit: int | None = None
    """Number of questions, from the beginning of the file; by default all."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    json: bool = False
    """Print the result as JSON, without progress bars."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce, print_json
    from radq.decoding.config import DEFAULT_KL_BUDGET, read_budget
    from radq.errors import OptionError
    from radq.guides.spec import GuideSpec, find_budget
    from radq.sources.model_source import ModelSource, check_language_model

    if arguments.limit is not None and arguments.limit < 1:
        raise OptionError(f"limit must be at least 1, got {arguments.limit}.", "leave it out to use all questions.")
    if not arguments.data.is_file():
        raise OptionError(f"there is no file {str(arguments.data)!r}.", "give a file of questions.")
    base = ModelSource.find(arguments.base)
    guides = [GuideSpec.parse(text, base) for text in arguments.guide]
    for one in guides:
        one.check()
    check_language_model(base)
    asked = arguments.kl_budget
    budget = find_budget(guides, DEFAULT_KL_BUDGET) if asked == "auto" else read_budget(asked)
    announce(f"loading {' and '.join([arguments.base, *arguments.guide])}", arguments.json)
    from radq.evaluation.choices import KeptAnswers, count_right, find_answers, read_questions
    from radq.evaluation.estimates import estimate, estimate_change
    from radq.guides.spec import load_guides
    from radq.models.loading import find_device, load

    questions = read_questions(arguments.data)[: arguments.limit]
    device = find_device(arguments.device)
    lm, tokenizer = load(base, device)
    guide = load_guides(guides, device, lm=lm)
    limit = None if budget == "none" else budget
    runs = {"unguided": (None, None)} | ({} if guide is None else {"guided": (guide, limit)})
    answers = {}
    for name, (one, most) in runs.items():
        kept = None
        if arguments.out is not None:
            asked = describe_answers(questions, arguments.base, guides if one else [], most)
            kept = KeptAnswers(arguments.out / f"{name}.jsonl", asked)
        answers[name] = find_answers(lm, tokenizer, questions, one, most, not arguments.json, kept)
    sums = {name: count_right(questions, found) for name, found in answers.items()}
    result = {name: asdict(estimate(one)) for name, one in sums.items()}
    if guide is not None:
        result["change"] = asdict(estimate_change(sums["guided"], sums["unguided"]))
    if arguments.json:
        print_json({"questions": len(questions), "accuracy": result, "answers": answers})
        return
    print(f"accuracy on {len(questions)} questions:")
    for name, one in result.items():
        print(f"  {name:<9} {one['value']:.3f} ({one['low']:.3f} to {one['high']:.3f})")


def describe_answers(
    questions: "Sequence[Question]", base: str, guides: "Sequence[GuideSpec]", kl_budget: float | None
) -> dict[str, object]:
    """All that answers depend on: fingerprints of the questions and of the models, and the numbers."""
    from radq.files import fingerprint_values
    from radq.sources.model_source import ModelSource

    return {
        "questions": fingerprint_values([asdict(question) for question in questions]),
        "base": ModelSource.find(base).fingerprint,
        "guides": [{"model": one.fingerprint, "numbers": one.numbers} for one in guides],
        "kl_budget": kl_budget,
    }
