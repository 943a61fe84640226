"""The folder of a PEFT adapter stands for its base model with the adapter merged; everything else is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import radq
from radq.cli import main
from radq.decoding.generate import generate
from radq.errors import ModelError
from radq.judges.models import load_classifier
from radq.models.kinds import RadQ
from radq.models.reward import RewardModel
from radq.sources.hub import quiet
from radq.sources.model_source import ModelSource

LORA: dict[str, Any] = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
TEXTS = ["the film was good .", "the film was quite bad and dull ."]


def save_adapter(base: Path, out: Path, auto_class: Any, num_labels: int | None = None, **settings: Any) -> Path:
    """Save an adapter with random weights, and for a classifier a random head."""
    torch.manual_seed(1)
    options = {} if num_labels is None else {"num_labels": num_labels, "pad_token_id": 0}
    with quiet():
        model = auto_class.from_pretrained(base, **options)
        get_peft_model(model, LoraConfig(**(LORA | settings))).save_pretrained(str(out))
    return out


@pytest.fixture(scope="module")
def adapter(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(toy, tmp_path_factory.mktemp("peft") / "adapter", AutoModelForCausalLM)


@pytest.fixture(scope="module")
def classifier(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft") / "classifier"
    return save_adapter(toy, folder, AutoModelForSequenceClassification, 3, task_type=TaskType.SEQ_CLS)


@torch.no_grad()
def test_the_base_model_is_loaded_with_the_adapter(adapter: Path, toy: Path) -> None:
    lm, tokenizer = radq.load(adapter, "cpu")
    assert type(lm) is type(radq.load(toy, "cpu")[0])
    plain = AutoModelForCausalLM.from_pretrained(toy).eval()
    input_ids = torch.tensor([tokenizer(TEXTS[1]).input_ids])
    before = plain(input_ids).logits
    assert (lm(input_ids).logits - before).abs().max() > 0.1
    torch.testing.assert_close(lm(input_ids).logits, PeftModel.from_pretrained(plain, str(adapter))(input_ids).logits)


def test_the_command_line_steers_the_adapted_model(
    adapter: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RadQ.from_backbone(toy, attributes=["praise"]).save_pretrained(tmp_path / "praise")
    texts = []
    for base in (toy, adapter):
        options = ["--guide", f"{tmp_path / 'praise'}:praise=1", "--prompt", "the film was", "--temperature", "0"]
        assert main(["generate", "--base", str(base), *options, "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["generations"][0]["text"])
    assert texts[0] != texts[1]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_readout_of_the_plain_base_model_is_refused_beside_the_adapted_one(
    wrapped: bool, adapter: Path, toy: Path, tmp_path: Path
) -> None:
    RadQ.from_base(toy, ["praise"]).save_pretrained(tmp_path / "readout")
    lm = PeftModel.from_pretrained(radq.load(toy, "cpu")[0], str(adapter)) if wrapped else radq.load(adapter, "cpu")[0]
    with pytest.raises(ModelError, match="has adapters" if wrapped else "has other weights"):
        RewardModel.from_pretrained(tmp_path / "readout", lm=lm)


def test_a_readout_of_the_adapted_base_model_finds_it_again(adapter: Path, toy: Path, tmp_path: Path) -> None:
    RadQ.from_base(adapter, ["praise"]).save_pretrained(tmp_path / "readout")
    RewardModel.from_pretrained(tmp_path / "readout")
    RewardModel.from_pretrained(tmp_path / "readout", lm=radq.load(adapter, "cpu")[0])
    with pytest.raises(ModelError, match="has other weights"):
        RewardModel.from_pretrained(tmp_path / "readout", lm=radq.load(toy, "cpu")[0])


def test_the_first_layers_of_an_adapted_backbone_are_adapted(adapter: Path, toy: Path) -> None:
    adapted, plain = (RadQ.from_backbone(name, ["praise"], num_layers=1).backbone.h[0] for name in (adapter, toy))
    assert not torch.equal(adapted.attn.c_attn.weight, plain.attn.c_attn.weight)
    assert torch.equal(adapted.mlp.c_fc.weight, plain.mlp.c_fc.weight)


def test_scale_adapter_and_base_model_are_in_the_fingerprints(adapter: Path, toy: Path, tmp_path: Path) -> None:
    scaled = shutil.copytree(adapter, tmp_path / "scaled")
    settings = json.loads((scaled / "adapter_config.json").read_text())
    (scaled / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 99}))
    other = shutil.copytree(adapter, tmp_path / "other")
    AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(toy).config).save_pretrained(
        tmp_path / "base"
    )
    shutil.copy(toy / "tokenizer.json", tmp_path / "base")
    settings["base_model_name_or_path"] = str(tmp_path / "base")
    (other / "adapter_config.json").write_text(json.dumps(settings))
    for name in ("weights_fingerprint", "fingerprint", "identity"):
        assert len({getattr(ModelSource.find(one), name) for one in (toy, adapter, scaled, other)}) == 4


@torch.no_grad()
def test_a_classifier_with_an_adapter_teaches_with_it(classifier: Path, toy: Path) -> None:
    judges = load_classifier(f"{classifier}:LABEL_1=praise,2=blame")
    assert [judge.attribute for judge in judges] == ["praise", "blame"]
    with quiet():
        plain: Any = AutoModelForSequenceClassification.from_pretrained(toy, num_labels=3, pad_token_id=0)
    expected = PeftModel.from_pretrained(plain, str(classifier)).eval()
    rows = [ModelSource.find(toy).tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    shares = torch.stack([expected(row).logits[0].softmax(0) for row in rows])
    for column, judge in enumerate(judges, start=1):
        torch.testing.assert_close(torch.tensor(judge.score(TEXTS)), shares[:, column], check_dtype=False)


@pytest.mark.slow
def test_a_reward_model_learns_from_a_classifier_with_an_adapter(
    classifier: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.csv").write_text("text\n" + "\n".join(TEXTS * 10))
    options = ["--data", str(tmp_path / "texts.csv"), "--backbone", str(toy), "--max-steps", "2"]
    teacher = ["--teacher-classifier", f"{classifier}:LABEL_1=praise"]
    assert main(["distill", *teacher, *options, "--out", str(tmp_path / "praise")]) == 0
    assert RewardModel.from_pretrained(tmp_path / "praise").config.attributes == ["praise"]


# --- refused ---


def change(folder: Path, **settings: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("no base", "names no base model, but None. hint: write the name"),
        ("lost base", "base model of the adapter in .* is not found: there is no folder '/nowhere'"),
        ("other layers", r"does not fit .* 8 tensors are missing or have no place"),
        ("a pickle", r"has no adapter_model.safetensors. hint: save it with safetensors"),
        ("damaged weights", "is damaged"),
        ("two models", "holds a model and an adapter"),
        ("a classifier", "have no place there, the first is 'base_model.model.score.weight'"),
    ],
)
def test_a_folder_that_cannot_be_merged_is_refused(
    mistake: str, message: str, adapter: Path, classifier: Path, toy: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(classifier if mistake == "a classifier" else adapter, tmp_path / "adapter")
    if mistake == "no base":
        change(folder, base_model_name_or_path=None)
    elif mistake == "lost base":
        change(folder, base_model_name_or_path="/nowhere")
    elif mistake == "other layers":
        change(folder, target_modules=["c_fc"])
    elif mistake == "a pickle":
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    elif mistake == "damaged weights":
        (folder / "adapter_model.safetensors").write_bytes(b"no")
    elif mistake == "two models":
        shutil.copy(toy / "config.json", folder)
    with pytest.raises(ModelError, match=message):
        radq.load(folder, "cpu")


def test_trained_prompts_are_refused_since_decoding_would_leave_them_out(toy: Path, tmp_path: Path) -> None:
    lm, tokenizer = radq.load(toy, "cpu")
    settings = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4, base_model_name_or_path=str(toy))
    prompted: Any = get_peft_model(lm, settings)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match=r"a trained prompt of PEFT \(PROMPT_TUNING\)"):
        generate(prompted, tokenizer, ["the film was"])
    prompted.save_pretrained(str(tmp_path / "prompt"))
    with pytest.raises(ModelError, match="a trained prompt of PEFT"):
        radq.load(tmp_path / "prompt", "cpu")
