"""A RAD-V as a token classifier: its logits are the head outputs of the reward model, text by text."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from radq.errors import ModelError, OptionError
from radq.models.convert import make_token_classifier, save_token_classifier
from radq.models.kinds import RadQ, RadV
from radq.sources.hub import quiet

TEXTS = ["the film was good and moving .", "a dull plot"]


def randomise(model: RadV) -> RadV:
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("rank", [0, 2])
def test_logits_are_the_rewards_of_tokens(loss: str, rank: int, toy: Path, tmp_path: Path) -> None:
    model = RadV.from_backbone(toy, ["praise", "length"], loss=loss)
    if rank:
        model.add_lora(rank, str(toy))
    randomise(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_token_classifier(model, tmp_path / "classifier")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with quiet():
        classifier = AutoModelForTokenClassification.from_pretrained(tmp_path / "classifier").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "classifier")
    assert classifier.config.id2label == {0: "praise", 1: "length"}
    assert model.tokenizer is not None
    for text in TEXTS:
        ids = model.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        read = tokenizer(text, return_tensors="pt").input_ids
        assert read[0].tolist() == [model.config.bos_token_id, *ids[0].tolist()]
        with torch.no_grad():
            logits = classifier(read).logits[:, 1:]
            expected = model.token_rewards(ids, torch.ones_like(ids))
        torch.testing.assert_close(logits.sigmoid() if loss == "ce" else logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "mistral"])
def test_families(family: str, lm_folders: dict[str, Path]) -> None:
    model = randomise(RadV.from_backbone(lm_folders[family], ["a"]))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        bos = torch.tensor([[model.config.bos_token_id]])
        logits = make_token_classifier(model)(torch.cat([bos, ids], dim=1)).logits[:, 1:]
        torch.testing.assert_close(logits, model.token_rewards(ids), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_exported_is_refused(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a RadQ gives no rewards"):
        save_token_classifier(RadQ.from_backbone(toy, ["praise"]), tmp_path / "q")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OptionError, match="holds other files"):
        save_token_classifier(RadV.from_backbone(toy, ["praise"]), tmp_path / "full")
    assert not (tmp_path / "q").exists()
