"""The command line, run in this process: its output as text and as JSON, and error messages of one line."""

import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from command_runs import fails
from public_checkpoints import PublicRad, RunsCode, config_folder

from radq.cli import COMMANDS, main, rename_old_words
from radq.errors import OptionError
from radq.guides.spec import GuideSpec
from radq.models.kinds import RadQ, RadV
from radq.models.reward import RewardModel
from radq.report.tokens import coloured, legend


@pytest.fixture(scope="module")
def reward(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards") / "praise"
    torch.manual_seed(0)
    RadQ.from_backbone(toy, attributes=["praise", "length"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def value_reward(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards") / "value"
    RadV.from_backbone(toy, attributes=["calm"]).save_pretrained(folder)
    return folder


# --- the program ---


def test_importing_radq_and_asking_for_help_import_no_torch() -> None:
    for code in ("import radq", "import radq.cli as c; c.main(['--help'])"):
        check = f"{code}; import sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.DEVNULL).returncode == 0


def test_public_names_are_there() -> None:
    import radq

    for name in radq.__all__:
        assert getattr(radq, name).__name__ == name
        assert name in dir(radq)
    with pytest.raises(AttributeError, match="Nonsense"):
        radq.Nonsense  # noqa: B018


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("radq 0.")
    assert main([]) == 2


@pytest.mark.parametrize(
    ("old", "new", "notes"),
    [
        (["generate", "--num_samples=3"], ["generate", "--samples=3"], ["--num-samples"]),
        (["score", "--reward", "r", "--text", "a", "--text=b"], ["score", "a", "b", "--reward", "r"], ["--text"]),
        (["score", "--data", "f", "--text-column", "c"], ["score", "--data", "f", "--text", "c"], ["--text-column"]),
        (["score", "--data", "f", "--text", "c"], ["score", "--data", "f", "--text", "c"], []),
        (["label", "--text", "a", "--json"], ["judge", "score", "a", "--json"], ["radq label", "--text"]),
        (
            ["label", "--data=f", "--column", "c"],
            ["judge", "score", "--data=f", "--text", "c"],
            ["radq label", "--column"],
        ),
        (["judge", "train", "--text", "c"], ["judge", "train", "--text", "c"], []),
        (["measure", "f"], ["eval", "measure", "f"], ["radq measure"]),
    ],
)
def test_words_of_the_last_release_go_on_working_with_a_note(
    old: list[str], new: list[str], notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rename_old_words(old) == new
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("`")[1] for line in lines] == notes


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"radq {command}" in capsys.readouterr().out


def test_a_warning_is_one_line_that_stands_once(capsys: pytest.CaptureFixture[str]) -> None:
    fails(capsys, "generate")
    lines = [warnings.formatwarning("slow", UserWarning, "file.py", 1) for _ in range(2)]
    assert lines == ["warning: slow\n", ""]


def test_unknown_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "generate, serve, score" in fails(capsys, "genrate")
    with pytest.raises(SystemExit) as exit_:
        main(["score", "--nonsense"])
    assert exit_.value.code == 2


# --- generate ---


def test_generate_prints_json(toy: Path, reward: Path, value_reward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "generate",
        "--base",
        str(toy),
        "--guide",
        f"{reward}:praise=20,length=-1",
        "--guide",
        f"{value_reward}:calm=3",
    ]
    argv += [
        "--prompt",
        "the film",
        "--prompt",
        "",
        "--samples",
        "2",
        "--max-new-tokens",
        "6",
        "--seed",
        "5",
        "--json",
    ]
    assert main(argv) == 0
    first = capsys.readouterr().out
    generations = json.loads(first)["generations"]
    assert [g["prompt"] for g in generations] == ["the film", "the film", "", ""]
    assert {"text", "token_ids", "shifts", "finish_reason", "kl", "clipped"} < generations[0].keys()
    assert all(1 <= len(g["token_ids"]) <= 6 for g in generations)
    assert main(argv) == 0
    assert capsys.readouterr().out == first


def test_generate_prints_a_table(toy: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("the film\n\n  \nthis plot was\n")
    argv = [
        "generate",
        "--base",
        str(toy),
        "--guide",
        f"{reward}:praise=20",
        "--prompts",
        str(tmp_path / "prompts.txt"),
    ]
    assert main([*argv, "--top-k", "0", "--top-p", "0.9", "--kl-budget", "0.5", "--no-clamp"]) == 0
    text = capsys.readouterr().out
    assert "this plot was" in text
    assert "KL/token" in text
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    texts = json.loads(capsys.readouterr().out)["generations"]
    assert [text["prompt"] for text in texts] == ["the film", "this plot was"]  # blank lines are no prompts


def test_generate_without_a_guide(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--base", str(toy), "--prompt", "the film", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generations"][0]["kl"] == 0
    assert main(["generate", "--base", str(toy), "--prompt", "the film"]) == 0


def test_generate_names_mistakes(toy: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["generate", "--base", str(toy)]
    prompt = ["--prompt", "the film"]
    guide = ["--guide", f"{reward}:praise=5"]
    assert "no prompt" in fails(capsys, *base)
    assert "got 1.5" in fails(capsys, *base, *prompt, "--top-p", "1.5")
    assert "got 999" in fails(capsys, *base, *prompt, "--top-k", "999")
    assert "'toxicity'" in fails(capsys, *base, *prompt, "--guide", f"{reward}:toxicity=-5")
    assert "praise, length" in fails(capsys, *base, *prompt, "--guide", f"{reward}:toxicity=-5")
    assert "DIR:attribute=beta" in fails(capsys, *base, *prompt, "--guide", str(reward))
    assert "nowhere" in fails(capsys, *base, *prompt, "--guide", f"{tmp_path}/nowhere:praise=5")
    assert "nowhere" in fails(capsys, "generate", "--base", f"{tmp_path}/nowhere", *prompt)
    assert "exceed" in fails(capsys, *base, *guide, "--prompt", "the film " * 40)
    assert "no device 'abacus'" in fails(capsys, *base, *prompt, "--device", "abacus")
    assert main([*base, "--prompts", str(tmp_path / "missing.txt")]) == 2
    assert "missing.txt" in capsys.readouterr().err


def test_generate_refuses_another_vocabulary(reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from radq.toy import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["opera"])
    GPT2LMHeadModel(GPT2Config(vocab_size=7, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "opera")
    small = json.loads(tokenizer.backend_tokenizer.to_str())
    small["model"]["vocab"] = {"<|endoftext|>": 0, "<unk>": 1, "▁opera": 2}
    small["added_tokens"] = []
    from tokenizers import Tokenizer

    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(small))
    tokenizer.save_pretrained(tmp_path / "opera")
    capsys.readouterr()
    line = fails(
        capsys, "generate", "--base", str(tmp_path / "opera"), "--guide", f"{reward}:praise=1", "--prompt", "opera"
    )
    assert "opera" in line
    assert "vocabulary" in line


def test_guides_are_read_from_text() -> None:
    assert GuideSpec.parse("a/b:toxicity=-50") == GuideSpec("a/b", {"toxicity": -50.0})
    assert GuideSpec.parse("C:\\x:nice=1.5, rude=-2e1") == GuideSpec("C:\\x", {"nice": 1.5, "rude": -20.0})
    for wrong in ("folder", "folder:", "folder:nice", "folder:nice=much", ":nice=1"):
        with pytest.raises(OptionError, match="DIR:attribute"):
            GuideSpec.parse(wrong)


def test_generate_reads_the_text_of_a_guide_once(
    toy: Path, reward: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, read = GuideSpec.parse, []

    def count(text: str, *arguments: Any) -> GuideSpec:
        read.append(text)
        return parse(text, *arguments)

    monkeypatch.setattr(GuideSpec, "parse", count)
    guide = f"{reward}:praise=20"
    for more in ([], ["--json"], ["--stream"]):
        read.clear()
        assert main(["generate", "--base", str(toy), "--prompt", "the film", "--guide", guide, *more]) == 0
        assert read == [guide]


# --- score ---


def test_score_prints_json(reward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "--reward", str(reward), "the film was good  ", "dull", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["attributes"] == ["praise", "length"]
    first, second = document["texts"]
    assert first["text"] == "the film was good"
    assert "".join(token["token"] for token in first["tokens"]) == "the film was good"
    model = RewardModel.from_pretrained(reward)
    assert model.tokenizer is not None
    ids = model.tokenizer("the film was good").input_ids
    assert [token["id"] for token in first["tokens"]] == ids
    expected = model.token_rewards(torch.tensor([ids]))[0, :, 1].tolist()
    assert [token["rewards"]["length"] for token in first["tokens"]] == pytest.approx(expected, abs=1e-6)
    assert len(second["tokens"]) == 1


def test_score_prints_a_table(reward: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "--reward", str(reward), "the film was good"]) == 0
    text = capsys.readouterr().out
    assert "praise" in text
    assert "film" in text


def test_colours_mean_low_and_high() -> None:
    """Blue and orange, which say neither good nor bad, with a legend; the middle has no colour."""
    styles = [span.style for span in coloured([("a", 0.0), ("b", 0.5), ("c", 1.0), ("d", -3.0)], 0.0, 1.0).spans]
    assert styles == ["on #0050b4", "on #be5f00", "on #0050b4"]
    shown = legend(0.0, 1.0, "rewards")
    assert shown.plain == " low  to  high : rewards"
    assert [span.style for span in shown.spans] == ["on #0050b4", "on #be5f00"]
    assert not coloured([("a", 1.0)], 1.0, 1.0).spans


def test_score_names_mistakes(toy: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no text" in fails(capsys, "score", "--reward", str(reward))
    assert "empty" in fails(capsys, "score", "--reward", str(reward), "  ")
    assert "not a reward model" in fails(capsys, "score", "--reward", str(toy), "a")
    assert "positions" in fails(capsys, "score", "--reward", str(reward), "film " * 70)
    broken = tmp_path / "broken"
    RewardModel.from_pretrained(reward).save_pretrained(broken)
    (broken / "model.safetensors").write_bytes(b"\x00" * 20)
    assert "damaged" in fails(capsys, "score", "--reward", str(broken), "a")
    for file in broken.glob("tokenizer*"):
        file.unlink()
    RewardModel.from_pretrained(reward)
    (broken / "model.safetensors").write_bytes((reward / "model.safetensors").read_bytes())
    assert "no tokenizer" in fails(capsys, "score", "--reward", str(broken), "a")


# --- convert ---


def test_convert_writes_a_reward_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(PublicRad("gpt2", 7).state_dict(), tmp_path / "pytorch_model.bin")
    backbone = str(config_folder("gpt2", tmp_path / "backbone"))
    argv = ["convert", str(tmp_path / "pytorch_model.bin"), str(tmp_path / "out"), "--backbone", backbone]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "RadV"
    assert document["attributes"][0] == "toxicity"
    assert type(RewardModel.from_pretrained(tmp_path / "out")) is RadV
    assert "exists" in fails(capsys, *argv)
    assert main([*argv, "--overwrite", "--attributes", "a,b,c,d,e,f,g", "--prepend-bos", "True"]) == 0
    assert "RadV with a, b, c" in capsys.readouterr().out
    assert RewardModel.from_pretrained(tmp_path / "out").config.prepend_bos


def test_convert_names_mistakes_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backbone = str(config_folder("gpt2", tmp_path / "backbone"))
    (tmp_path / "code.pt").write_bytes(pickle.dumps(RunsCode()))
    torch.save({"x": torch.ones(2)}, tmp_path / "other.pt")
    before = sorted(tmp_path.iterdir())
    out = str(tmp_path / "out")
    assert "run code" in fails(capsys, "convert", str(tmp_path / "code.pt"), out, "--backbone", backbone)
    assert "layout is unknown" in fails(capsys, "convert", str(tmp_path / "other.pt"), out, "--backbone", backbone)
    assert "no checkpoint" in fails(capsys, "convert", str(tmp_path / "none.pt"), out, "--backbone", backbone)
    assert sorted(tmp_path.iterdir()) == before
