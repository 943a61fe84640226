"""Multiple-choice questions: does a guided language model still know what it knows without a guide?

    questions = read_questions("questions.jsonl")  # {"question": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}
    find_answers(lm, tokenizer, questions, guide)

The answer of a model is the choice with the highest mean log-probability of its tokens after the question. Under a
guide, the probabilities are those that the guide leaves, over the whole vocabulary.
Axes: b choices of a question, t time, v vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.data.tables import read_table
from radq.decoding.config import DEFAULT_KL_BUDGET, Steering
from radq.decoding.steering import RowSettings, propose
from radq.errors import DataError, OptionError
from radq.evaluation.estimates import Sums
from radq.evaluation.perplexity import encode_pairs
from radq.evaluation.sweep.config import find_changes
from radq.files import append_lines, drop_partial_last_line, explained_writing, read_lines
from radq.guides.base import Guide
from radq.models.loading import Wrappable
from radq.numerics import pad_left, same_kernels

WANTED = '{"question": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}'


@dataclass(frozen=True)
class Question:
    """A text, choices to continue it with, and the number of the right one, from 0 on."""

    text: str
    choices: tuple[str, ...]
    answer: int


def read_questions(file: str | Path) -> list[Question]:
    """Read questions from jsonl or parquet; an answer is a number from 0 on, or one of the choices."""
    questions: list[Question] = []
    for table in read_table(file):
        for name in ("question", "choices", "answer"):
            if name not in table.columns:
                raise DataError(f"{file} has no field {name!r}.", f"write a question as {WANTED}.")
        for row in table.to_dict("records"):
            questions.append(_read_question(row, f"{file}, row {len(questions) + 1}"))
    if not questions:
        raise DataError(f"{file}: there are no questions.", f"write a question as {WANTED}.")
    return questions


def _read_question(row: dict[Any, Any], place: str) -> Question:
    text, answer = row["question"], row["answer"]
    choices = row["choices"].tolist() if isinstance(row["choices"], np.ndarray) else row["choices"]
    right = isinstance(text, str) and isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    if not right or not len(set(choices)) == len(choices) >= 2 or not all(choice.strip() for choice in choices):
        raise DataError(f"{place} has no question with two or more different choices.", f"write it as {WANTED}.")
    number = choices.index(answer) if answer in choices else answer
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number < len(choices):
        raise DataError(f"{place}: the answer {answer!r} is none of the choices.", "give its number, from 0 on.")
    return Question(text, tuple(choices), int(number))


@same_kernels()
@torch.no_grad()
def find_answers(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    guide: Guide | None = None,
    kl_budget: float | None = DEFAULT_KL_BUDGET,
    progress: bool = False,
    kept: "KeptAnswers | None" = None,
) -> list[int]:
    """Find the answer of the model to each question, as the number of a choice; those in `kept` are not found again."""
    steering = Steering(top_k=None, kl_budget=kl_budget)
    answers = [] if kept is None else list(kept.answers)
    for question in tqdm(questions[len(answers) :], unit="question", desc="answering", disable=not progress):
        answers.append(int(_score_choices(lm, tokenizer, question, guide, steering).argmax()))
        if kept is not None:
            kept.append(answers[-1])
    return answers


class KeptAnswers:
    """The answers to the first questions of a file, on disk, where a run that was stopped goes on.

    Args:
        file: a jsonl file, which need not be there.
        asked: all that answers depend on; answers to anything else are refused.
    """

    def __init__(self, file: Path, asked: dict[str, Any]):
        self.file = file
        drop_partial_last_line(file)
        rows = list(read_lines(file)) if file.exists() else []
        if rows and rows[0] != {"asked": asked}:
            changed = list(find_changes(rows[0].get("asked"), asked))
            raise OptionError(
                f"{str(file)!r} holds answers to other questions, or of other models; changed: {'; '.join(changed)}.",
                "choose another folder, or delete this file.",
            )
        self.answers = [row["answer"] for row in rows[1:]]
        if not rows:
            self._write({"asked": asked})

    def append(self, answer: int) -> None:
        self.answers.append(answer)
        self._write({"answer": answer})

    def _write(self, row: dict[str, Any]) -> None:
        with explained_writing(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab") as stream:
                append_lines(stream, [row])


def count_right(questions: Sequence[Question], answers: Sequence[int]) -> Sums:
    """The sums of the accuracy, the share of right answers."""
    right = np.array([question.answer == answer for question, answer in zip(questions, answers, strict=True)])
    return Sums(right.astype(float), np.ones(len(right)))


def _score_choices(
    lm: Wrappable, tokenizer: PreTrainedTokenizerBase, question: Question, guide: Guide | None, steering: Steering
) -> Float[Tensor, " b"]:
    """Compute the mean log-probability of the tokens of each choice."""
    pairs = encode_pairs(lm, tokenizer, [question.text] * len(question.choices), question.choices)
    scores = []
    for pair in pairs:  # one by one: a choice may change the last token of the question
        prompt, mask = pad_left([pair.prompt], device=lm.device)
        tokens = torch.tensor([pair.continuation], device=lm.device)
        logits = lm(input_ids=torch.cat([prompt, tokens], 1)).logits[:, len(pair.prompt) - 1 : -1]  # (1, t, v)
        state = None if guide is None else guide.start(prompt, mask)
        total = torch.zeros((), dtype=torch.float64, device=lm.device)
        for step, token in zip(logits.unbind(1), tokens.unbind(1), strict=True):
            proposal = propose(step, guide, state, RowSettings.repeat(steering, guide, step)).require_finite()
            log_probabilities = proposal.logits.double().log_softmax(-1)
            total += log_probabilities[proposal.candidates == token[:, None]].sum()
            if guide is not None:
                state = guide.advance(proposal.state, token)
        scores.append(total / tokens.shape[1])
    return torch.stack(scores)
