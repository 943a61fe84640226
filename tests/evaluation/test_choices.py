"""Answers to multiple-choice questions, against log-probabilities computed by hand."""

import json
from pathlib import Path

import pytest
import torch
from command_calls import make_steering_model
from command_runs import fails
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import radq
from radq.cli import main
from radq.errors import DataError
from radq.evaluation.choices import Question, find_answers, read_questions
from radq.numerics import pad_left

QUESTIONS = [
    Question("the film was", (" good", " bad", " the"), 0),
    Question("the plot", (" was dull", " is very good", " and the"), 1),
    Question("a", (" story", " film was"), 0),
]


def answer_by_hand(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: Question, model: radq.RewardModel, beta: float
) -> int:
    """Guided log-probabilities from whole forwards, token by token, with rewards of the whole vocabulary."""
    scores = []
    bos = tokenizer.bos_token_id
    for choice in question.choices:
        ids = tokenizer(question.text + choice, add_special_tokens=False).input_ids
        begin = len(tokenizer(question.text, add_special_tokens=False).input_ids)
        total = 0.0
        for place in range(begin, len(ids)):
            prefix = torch.tensor([[bos, *ids[:place]]])
            logits = lm(input_ids=prefix).logits[0, -1].double()
            rewards = model.next_rewards(*pad_left([[bos, *ids[:place]]]))[0, :, 0].double().clamp(-1, 1)
            total += float((logits + beta * rewards).log_softmax(-1)[ids[place]])
        scores.append(total / (len(ids) - begin))
    return scores.index(max(scores))


@torch.no_grad()
def test_answers_are_those_of_the_guided_probabilities(
    toy: Path, toy_lm: PreTrainedModel, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    torch.manual_seed(0)
    model = make_steering_model(toy, ["praise"]).eval()
    for beta in (0.0, 5.0, -20.0):
        guide = radq.RewardGuide(model, {"praise": beta})
        expected = [answer_by_hand(toy_lm, toy_tokenizer, one, model, beta) for one in QUESTIONS]
        assert find_answers(toy_lm, toy_tokenizer, QUESTIONS, guide, kl_budget=None) == expected
    unguided = [answer_by_hand(toy_lm, toy_tokenizer, one, model, 0.0) for one in QUESTIONS]
    assert find_answers(toy_lm, toy_tokenizer, QUESTIONS) == unguided
    strong = radq.RewardGuide(model, {"praise": -50.0})
    assert find_answers(toy_lm, toy_tokenizer, QUESTIONS, strong, kl_budget=0.0) == unguided


def test_the_command(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_steering_model(toy, ["praise"]).save_pretrained(tmp_path / "q")
    rows = [{"question": one.text, "choices": list(one.choices), "answer": one.answer} for one in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "choices", "--data", str(tmp_path / "questions.jsonl"), "--base", str(toy), "--json"]
    assert main([*words, "--guide", f"{tmp_path / 'q'}:praise=5"]) == 0
    found = json.loads(capsys.readouterr().out)
    right = [answer == one.answer for answer, one in zip(found["answers"]["guided"], QUESTIONS, strict=True)]
    assert found["accuracy"]["guided"]["value"] == pytest.approx(sum(right) / 3)
    assert "change" in found["accuracy"]
    assert "there is no file" in fails(capsys, "eval", "choices", "--data", "nowhere.jsonl")


def test_a_stopped_command_goes_on(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_steering_model(toy, ["praise"]).save_pretrained(tmp_path / "q")
    rows = [{"question": one.text, "choices": list(one.choices), "answer": one.answer} for one in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "choices", "--data", str(tmp_path / "questions.jsonl"), "--base", str(toy), "--json"]
    words += ["--out", str(tmp_path / "answers"), "--guide", f"{tmp_path / 'q'}:praise=5"]
    assert main(words) == 0
    whole = json.loads(capsys.readouterr().out)
    file = tmp_path / "answers" / "guided.jsonl"
    first, one, *rest = file.read_text().splitlines(keepends=True)
    wrong = (json.loads(one)["answer"] + 1) % 3
    file.write_text(first + json.dumps({"answer": wrong}) + "\n" + rest[0][:4])  # killed while it wrote the second
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answers"]["guided"] == [wrong, *whole["answers"]["guided"][1:]]  # the first was not asked again
    assert found["answers"]["unguided"] == whole["answers"]["unguided"]
    assert "guides: " in fails(capsys, *words[:-1], f"{tmp_path / 'q'}:praise=6")
    assert "changed: questions" in fails(capsys, *words, "--limit", "2")
    torch.manual_seed(1)
    make_steering_model(toy, ["praise"]).save_pretrained(tmp_path / "q")
    assert "guides: " in fails(capsys, *words)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "a", "choices": ["b"], "answer": 0},
        {"question": "a", "choices": ["b", "b"], "answer": 0},
        {"question": "a", "choices": ["b", "c"], "answer": 2},
        {"question": "a", "choices": ["b", "c"], "answer": "d"},
        {"question": 3, "choices": ["b", "c"], "answer": 0},
        {"question": "a", "choices": "bc", "answer": 0},
        {"question": "a", "answer": 0},
    ],
)
def test_wrong_questions(tmp_path: Path, row: dict[str, object]) -> None:
    (tmp_path / "questions.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError):
        read_questions(tmp_path / "questions.jsonl")


def test_an_answer_may_be_the_choice_itself(tmp_path: Path) -> None:
    row = {"question": "a", "choices": ["b", "c"], "answer": "c"}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row) + "\n")
    assert read_questions(tmp_path / "questions.jsonl") == [Question("a", ("b", "c"), 1)]
