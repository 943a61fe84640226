"""Tiny text models for the tests of judges: random transformers classifiers, and an ONNX file written byte by byte."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.implementations import BertWordPieceTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from radq.sources.hub import quiet

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"a good bad film plot very the was dull fine".split()]
MODELS = {
    "bert": (BertForSequenceClassification, BertConfig),
    "roberta": (RobertaForSequenceClassification, RobertaConfig),
    "gpt2": (GPT2ForSequenceClassification, GPT2Config),
    "encoder": (BertModel, BertConfig),
}


def make_word_tokenizer(special: bool = True) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    if special:
        words.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]")


def make_classifier(
    folder: Path, labels: Sequence[str] = ("negative", "positive"), kind: str = "bert", seed: int = 0, **options: Any
) -> Path:
    """A random model of 24 positions over `WORDS`, with large weights, so that every word matters."""
    model_class, config_class = MODELS[kind]
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
    if kind != "gpt2":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        sizes |= {"max_position_embeddings": 24, "pad_token_id": 0}
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
    torch.manual_seed(seed)
    model = model_class(config_class(vocab_size=len(WORDS), **sizes, **names, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    with quiet():
        model.save_pretrained(folder)
    make_word_tokenizer(special=kind != "gpt2").save_pretrained(folder)
    return folder


def make_wordpiece_classifier(
    folder: Path, labels: Sequence[str] = ("negative", "positive"), seed: int = 0, **options: Any
) -> Path:
    """A random BERT with 24 positions and a WordPiece tokenizer of its own, which cuts words into pieces."""
    letters = "abcdefghijklmnopqrstuvwxyz."
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    pieces += ["the", "fi", "##lm", "good", "bad", "##ing", "very"]
    words: Any = BertWordPieceTokenizer({piece: n for n, piece in enumerate(pieces)})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(seed)
    config = BertConfig(vocab_size=len(pieces), max_position_embeddings=24, pad_token_id=0, **sizes, **names, **options)
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# --- ONNX, which is a protocol buffer ---


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low]) if not rest else bytes([low | 0x80]) + _varint(rest)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _node(operation: str, inputs: Sequence[str], output: str, **attributes: Sequence[int] | int) -> bytes:
    data = b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(4, operation)
    for name, value in attributes.items():
        values = _field(3, value) + _field(20, 2) if isinstance(value, int) else b""
        if not isinstance(value, int):
            values = b"".join(_field(8, number) for number in value) + _field(20, 7)
        data += _field(5, _field(1, name) + values)
    return data


def _value(name: str, element: int, shape: Sequence[int | str]) -> bytes:
    dimensions = b"".join(_field(1, _field(1 if isinstance(size, int) else 2, size)) for size in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, element) + _field(2, dimensions)))


def make_onnx(
    folder: Path, table: Sequence[Sequence[float]], pooled: bool = True, extra_input: str = "attention_mask"
) -> Path:
    """A model that looks each token up in a table and, unless it is an encoder, takes the mean over the tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    width = len(table[0])
    flat = struct.pack(f"<{len(table) * width}f", *(value for row in table for value in row))
    weights = _field(1, len(table)) + _field(1, width) + _field(2, 1) + _field(8, "table") + _field(9, flat)
    graph = _field(1, _node("Gather", ["table", "input_ids"], "hidden" if pooled else "output", axis=0))
    if pooled:
        graph += _field(1, _node("ReduceMean", ["hidden"], "output", axes=[1], keepdims=0))
    graph += _field(2, "graph") + _field(5, weights)
    for name in ("input_ids", extra_input):
        graph += _field(11, _value(name, 7, ["b", "t"]))
    graph += _field(12, _value("output", 1, ["b", width] if pooled else ["b", "t", width]))
    model = _field(1, 8) + _field(7, graph) + _field(8, _field(1, "") + _field(2, 13))
    (folder / "model.onnx").write_bytes(model)
    make_word_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_config(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(values))
