"""Chats in the columns of texts and prompts: the template writes them, and the last answer alone has a loss."""

import copy
import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import RewardData, load_data
from radq.data.examples import DataColumns
from radq.errors import DataError

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} . {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
ASKED = {"role": "user", "content": "how was the film"}
GOOD, BAD = ({"role": "assistant", "content": f"the film was {word}"} for word in ("good", "bad"))
AGAIN = {"role": "user", "content": "and the plot"}


@pytest.fixture
def tokenizer(toy_tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    copied = copy.deepcopy(toy_tokenizer)
    copied.chat_template = TEMPLATE
    return copied


def load(file: Path, tokenizer: PreTrainedTokenizerBase, **columns: Any) -> RewardData:
    return load_data([file], tokenizer, DataColumns(labels=["y"], **columns), cache_folder=file.parent / "cache")


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def parts(data: RewardData) -> list[tuple[list[int], list[int]]]:
    """The tokens of each row without a loss and with one."""
    batch = data.batch(range(len(data)))
    columns = zip(*(batch[name] for name in ("input_ids", "attention_mask", "loss_mask")), strict=True)
    return [
        (ids[attended.bool() & ~counted.bool()].tolist(), ids[counted.bool()].tolist())
        for ids, attended, counted in columns
    ]


def encode(tokenizer: PreTrainedTokenizerBase, *texts: str) -> tuple[list[int], ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids for text in texts)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_last_answer_of_messages_has_the_loss(
    suffix: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [{"messages": [ASKED, GOOD], "y": 1}, {"messages": [ASKED, GOOD, AGAIN, BAD], "y": 0}]
    data = load(write(tmp_path / f"chats{suffix}", rows), tokenizer, text="messages")
    first = "user how was the film . assistant"
    assert parts(data) == [
        encode(tokenizer, first, " the film was good ."),
        encode(tokenizer, f"{first} the film was good . user and the plot . assistant", " the film was bad ."),
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_prompt_and_completion_in_the_form_of_trl(
    suffix: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """As chats, as a chat with a text beside it, and the chat in one column are the same rows."""
    whole = load(write(tmp_path / f"whole{suffix}", [{"messages": [ASKED, GOOD], "y": 1}]), tokenizer, text="messages")
    for number, (prompt, completion) in enumerate(
        [([ASKED], [GOOD]), ([ASKED], GOOD["content"]), (ASKED["content"], [GOOD]), ([ASKED], [ASKED, GOOD])]
    ):
        rows = [{"prompt": prompt, "completion": completion, "y": 1}]
        file = write(tmp_path / f"{number}{suffix}", rows)
        assert parts(load(file, tokenizer, text="completion", prompt="prompt")) == parts(whole)


def test_texts_and_chats_stand_side_by_side(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"t": "the film was good", "p": None, "y": 1}, {"t": [GOOD], "p": "", "y": 1}]
    data = load(write(tmp_path / "rows.jsonl", rows), tokenizer, text="t", prompt="p")
    assert parts(data) == [
        encode(tokenizer, "", "the film was good"),
        encode(tokenizer, "", "assistant the film was good ."),
    ]


@pytest.mark.parametrize("chat", [[], [ASKED], [GOOD, AGAIN], [ASKED, {"role": "assistant", "content": " "}]], ids=str)
def test_chats_without_an_answer_are_refused_or_left_out(
    chat: list[Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    file = write(tmp_path / "chats.jsonl", [{"messages": [ASKED, GOOD], "y": 1}, {"messages": chat, "y": 0}])
    with pytest.raises(DataError, match="row 2: 'messages' does not end with an answer"):
        load(file, tokenizer, text="messages")
    data = load(file, tokenizer, text="messages", skip_empty=True)
    assert (len(data), data.counts.empty) == (1, 1)


def test_another_template_writes_other_tokens(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", [{"messages": [ASKED, GOOD], "y": 1}])
    before = parts(load(file, tokenizer, text="messages"))
    tokenizer.chat_template = TEMPLATE.replace("{{ m.role }} ", "")
    assert parts(load(file, tokenizer, text="messages")) != before


def test_without_a_tokenizer_chats_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", [{"messages": [ASKED, GOOD], "y": 1}])
    with pytest.raises(DataError, match="row 1: 'messages' is a list, not a text"):
        list(DataColumns("messages", ["y"]).read(file))
