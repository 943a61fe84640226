"""The recipes load, follow one another and run; the loop on one page learns what radq's RadQ says it has learnt."""

import csv
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
import tyro
from beartype import BeartypeConf
from beartype.door import is_bearable
from safetensors.torch import load_file
from scripts import run_script
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from radq import RadQ
from radq.cli import find_command
from radq.data.examples import DataColumns
from radq.evaluation.sweep.config import load_sweep
from radq.settings import read_yaml
from radq.sources.hub import quiet
from radq.toy import make_reviews
from radq.training.config import RewardTrainingConfig
from radq.training.losses import baseline_loss, squared_loss
from radq.training.reward import train
from radq.training.trainer_setup import Task, complete

FOLDER = Path(__file__).parents[2] / "recipes"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
RECIPES = {path.stem: read_yaml(path, RewardTrainingConfig) for path in sorted(FOLDER.glob("*.yaml"))}
OUTS = {settings.out: name for name, settings in RECIPES.items()}
IN_ORDER = re.findall(r"^\| `([\w-]+)` \|", README, flags=re.MULTILINE)
each_recipe = pytest.mark.parametrize("name", RECIPES)


def comment(name: str) -> str:
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    return "\n".join(line.removeprefix("#").strip() for line in lines)


def command_of(name: str) -> str:
    (command,) = re.findall(rf"^radq (train|distill) --config recipes/{name}\.yaml$", comment(name), re.MULTILINE)
    return command


# --- the files ---


def test_every_run_of_the_paper_has_a_recipe() -> None:
    tasks = {f"{task}-{model}" for task in ("detox", "llama-detox") for model in ("v", "q", "q-distill")}
    stages = {f"sentiment-{kind}-{stage}" for kind in "vq" for stage in ("1-amazon", "2-sst2")}
    ablations = {f"ablation-{what}" for what in ("no-regulariser", "no-baseline", "ce", "mlp")}
    assert set(RECIPES) == tasks | stages | ablations | {"sentiment-q-distill"}


@each_recipe
def test_a_recipe_holds_what_differs_from_the_defaults(name: str) -> None:
    settings, defaults = RECIPES[name], RewardTrainingConfig()
    settings.check()
    hints = get_type_hints(RewardTrainingConfig)
    for option in fields(settings):  # YAML reads 1e-5, without a dot, as a word
        value = getattr(settings, option.name)
        assert is_bearable(value, hints[option.name], conf=BeartypeConf(is_pep484_tower=True)), (option.name, value)
    written = re.findall(r"^(\w+):", (FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert written == [option for option in written if getattr(settings, option) != getattr(defaults, option)]


@each_recipe
def test_the_command_in_its_comment_runs_it(name: str) -> None:
    command = command_of(name)
    assert (command == "distill") == bool(RECIPES[name].teacher)
    kind, _, module = find_command(command)
    argv = ["--config", str(FOLDER / f"{name}.yaml")]
    arguments = tyro.cli(kind, args=argv, default=module.defaults(kind, argv))
    for option in fields(RewardTrainingConfig):
        assert getattr(arguments, option.name) == getattr(RECIPES[name], option.name)


@each_recipe
def test_a_recipe_builds_on_others(name: str) -> None:
    settings = RECIPES[name]
    assert settings.out == f"runs/{name}"
    assert bool(settings.init) == ("-2-" in name)
    assert bool(settings.teacher) == ("distill" in name or name in ("ablation-no-regulariser", "ablation-no-baseline"))
    if settings.init:
        first = RECIPES[OUTS[settings.init]]
        assert (first.kind, first.attributes) == (settings.kind, settings.attributes)
    if settings.teacher:
        teacher = RECIPES[OUTS[settings.teacher]]
        assert teacher.kind == "v"
        assert settings.backbone == (teacher.backbone or RECIPES[OUTS[teacher.init]].backbone)
    for other in filter(None, (settings.init, settings.teacher)):
        assert IN_ORDER.index(OUTS[other]) < IN_ORDER.index(name)
        assert OUTS[other] in comment(name).split("Order: ")[1]


@each_recipe
def test_a_recipe_is_in_the_readme(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \|.*$", README, flags=re.MULTILINE)
    *_, after, command, _ = (cell.strip() for cell in row.split("|"))
    assert command == f"`radq {command_of(name)} --config recipes/{name}.yaml`"
    needed = RECIPES[name].init or RECIPES[name].teacher
    assert after == (f"`{OUTS[needed]}`" if needed else "")


def completed(settings: RewardTrainingConfig) -> RewardTrainingConfig:
    return complete(settings, Task(np.full(1000, 20), 768, 12, "gpu"))


def test_the_recipe_named_paper_is_the_papers() -> None:
    settings = completed(RewardTrainingConfig(recipe="paper"))
    assert (settings.adam_beta1, settings.adam_beta2, settings.adam_epsilon) == (0.9, 0.95, 1e-12)
    assert (settings.weight_decay, settings.batch_size) == (0.01, 100)
    assert (settings.learning_rate, settings.warmup_steps, settings.epochs) == (1e-5, 0, 5)
    assert (settings.reg_weight, settings.loss, settings.head) == (1.0, "mse", "linear")


def test_the_papers_other_numbers() -> None:
    for name, settings in ((name, completed(settings)) for name, settings in RECIPES.items()):
        assert settings.learning_rate == (2e-6 if "sst2" in name else 1e-5)
        assert settings.epochs == (1 if "1-amazon" in name else 5)
        assert len(settings.attributes) == (0 if settings.teacher else 1 if "sentiment" in name else 7)
        assert settings.reg_weight == (0 if "-no-" in name else 1)


# --- data ---

JIGSAW = "target severe_toxicity obscene identity_attack insult threat sexual_explicit".split()


def test_the_command_for_jigsaw_renames_a_column_and_keeps_the_rest(tmp_path: Path) -> None:
    of_recipes = {name: re.findall(r"^python -c .*$", comment(name), re.MULTILINE) for name in RECIPES}
    commands = {command for (command,) in filter(None, of_recipes.values())}
    assert [name for name, found in of_recipes.items() if found] == [
        name for name, settings in RECIPES.items() if "toxicity" in settings.attributes
    ]
    (command,) = commands
    texts = ['a "quoted", long\ncomment', "NA", "", "null"]
    with (tmp_path / "train.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", JIGSAW[0], "comment_text", *JIGSAW[1:]])
        writer.writerows([row, row / 10, text, *[0.5] * 6] for row, text in enumerate(texts))
    _, *arguments = shlex.split(command)
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True)
    settings = RECIPES["detox-q"]
    columns = DataColumns(settings.text, settings.attributes, skip_empty=settings.skip_empty)
    (piece,) = columns.read(tmp_path / settings.data[0])
    assert piece.texts == ['a "quoted", long\ncomment', "NA", "null"]
    assert piece.labels.values[:, 0].tolist() == pytest.approx([0.0, 0.1, 0.3])
    assert (piece.labels.values[:, 1:] == 0.5).all()


def write_reviews(path: Path, text: str, labels: list[str], count: int, seed: int = 0) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([text, *labels])
        writer.writerows([review, *[response] * len(labels)] for review, response in make_reviews(count, seed))


@pytest.mark.slow
def test_the_recipes_run_in_order(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step each, over the toy model and toy reviews in the recipe's columns."""
    monkeypatch.chdir(tmp_path)
    assert sorted(IN_ORDER) == sorted(RECIPES)
    for name in IN_ORDER:
        settings = RECIPES[name]
        write_reviews(tmp_path / f"{name}.csv", settings.text, settings.attributes, count=8)
        changes: dict[str, Any] = {"data": [f"{name}.csv"], "cache": "cache", "max_steps": 1, "batch_size": 4}
        train(replace(settings, **changes, backbone=str(toy) if settings.backbone else ""))
        assert (tmp_path / "runs" / name / "model.safetensors").is_file()


# --- the loop on one page ---


Learnt = tuple[RadQ, list[tuple[float, float]]]  # the model, and loss and last-token MSE of each epoch


@pytest.fixture(scope="module")
def learnt(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    """The script trains on reviews; what it wrote is loaded into a RadQ."""
    folder = tmp_path_factory.mktemp("loop")
    write_reviews(folder / "reviews.csv", "review", ["praise"], count=3000)
    columns = "--data reviews.csv --text review --label praise --out praise.safetensors"
    options = "--epochs 6 --batch-size 32 --lr 5e-3 --seed 0 --device cpu"
    argv = [*columns.split(), *options.split(), "--backbone", str(toy)]
    output = run_script(FOLDER / "minimal_loop.py", *argv, folder=folder)
    printed = re.findall(r"^epoch \d+: loss ([\d.]+), last-token MSE ([\d.]+)$", output, flags=re.MULTILINE)
    model = RadQ.from_backbone(toy, ["label"])
    model.load_state_dict(load_file(folder / "praise.safetensors"))
    return model, [(float(loss), float(error)) for loss, error in printed]


def read_reviews(model: RadQ, reviews: list[tuple[str, float]]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, mask, responses."""
    assert model.tokenizer is not None
    rows = [torch.tensor(model.tokenizer(text).input_ids) for text, _ in reviews]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, mask, torch.tensor([[response] for _, response in reviews])


@pytest.mark.slow
def test_the_loop_learns(learnt: Learnt) -> None:
    losses, errors = zip(*learnt[1], strict=True)
    assert len(losses) == 6
    assert losses[-1] < 0.75 * losses[0]
    assert errors[-1] < 0.02 < errors[0]


@torch.no_grad()
def test_radq_gives_the_rewards_that_the_loop_has_seen(learnt: Learnt) -> None:
    """The error it printed last, of every tenth review, is that of a RadQ with its weights."""
    model, printed = learnt
    ids, mask, responses = read_reviews(model, make_reviews(3000)[::10])
    last = model.token_rewards(ids, mask)[torch.arange(len(ids)), mask.sum(1) - 1]
    assert float((last - responses).square().mean()) == pytest.approx(printed[-1][1], abs=2e-6)


@torch.no_grad()
def test_radq_gives_the_rewards_of_the_formula(learnt: Learnt, toy: Path, toy_tokenizer: Any) -> None:
    """⟨h, w⟩ + ⟨h, W e(v)⟩ prefix by prefix, from the tensors of the file, against a padded batch of RadQ."""
    model, _ = learnt
    tensors = model.state_dict()
    with quiet():
        lm = AutoModelForCausalLM.from_pretrained(toy)
    lm.base_model.load_state_dict(
        {key.removeprefix("backbone."): value for key, value in tensors.items() if key.startswith("backbone.")}
    )
    weight, baseline = tensors["head.weight"][0], tensors["head.baseline_weight"][0]
    ids, mask, _ = read_reviews(model, make_reviews(4, seed=1))
    assert not mask.all()
    rewards = model.token_rewards(ids, mask)  # (b, t, 1)
    for row in range(len(ids)):
        for t in range(int(mask[row].sum())):
            prefix = torch.tensor([[toy_tokenizer.bos_token_id, *ids[row, :t].tolist()]])
            hidden = lm.base_model(input_ids=prefix).last_hidden_state[0, -1]  # (d,)
            wanted = hidden @ baseline + hidden @ (weight @ lm.get_output_embeddings().weight[ids[row, t]])
            torch.testing.assert_close(rewards[row, t, 0], wanted, rtol=1e-4, atol=1e-5)


def test_the_loss_of_the_loop_is_radqs() -> None:
    specification = importlib.util.spec_from_file_location("minimal_loop", FOLDER / "minimal_loop.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    torch.manual_seed(0)
    rewards, of_random, responses = torch.randn(3, 5, 1), torch.randn(3, 5, 1), torch.rand(3, 1)
    _, mask, _ = module.make_batch([([0] * (1 + length), 0.0) for length in (5, 1, 3)], "cpu")
    assert mask.tolist() == [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]]
    wanted = squared_loss(rewards, mask, responses) + baseline_loss(of_random, mask)
    torch.testing.assert_close(module.compute_loss(rewards, of_random, mask, responses), wanted)


def test_the_loop_trains_all_but_the_embeddings(learnt: Learnt, toy: Path) -> None:
    model, _ = learnt
    before = RadQ.from_backbone(toy, ["label"]).state_dict()
    same = [key for key, value in model.state_dict().items() if torch.equal(value, before[key])]
    assert same == ["backbone.wte.weight"]


def test_the_loop_is_a_page_without_radq() -> None:
    lines = (FOLDER / "minimal_loop.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if re.match(r"\s*(import|from) radq", line)]


@pytest.mark.parametrize("kind", ["v", "q"])
def test_the_expressivity_experiment_runs(kind: str, tmp_path: Path) -> None:
    options = f"--kind {kind} --n 8 --hidden 16 --layers 1 --steps 3 --batch-size 16"
    output = run_script(FOLDER / "expressivity.py", *options.split(), folder=tmp_path)
    assert f"RAD-{kind.upper()}, n = 8, d = 16: MSE" in output
    assert "over 36 entries" in output


# --- the embedded reward models ---


def test_the_recipes_of_the_embedded_models_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that a recipe, a script of its comment or the sweep names are made by other recipes."""
    files = {path.stem: path for path in (FOLDER / "embedded").glob("*.yaml") if not path.stem.endswith("-sweep")}
    recipes = {name: read_yaml(path, RewardTrainingConfig) for name, path in files.items()}
    made = {settings.out for settings in recipes.values()}
    assert len(made) == len(recipes) == 8
    sweep = load_sweep(FOLDER / "embedded" / "toxicity-sweep.yaml")
    named = {guide.folder for guide in sweep.guides.values()}
    named |= {use.judge.partition(":")[2] for use in sweep.judges.values() if use.judge.startswith("reward:")}
    named |= {name for settings in recipes.values() for name in (settings.init, settings.teacher) if name}
    parse = runpy.run_path(str(FOLDER / "embedded" / "own_texts.py"))["parse_arguments"]
    for attribute in ("sentiment", "toxicity"):
        text = " ".join(comment(f"embedded/{attribute}-3-value").split("python ", 1)[1].split("\\"))
        monkeypatch.setattr(sys, "argv", shlex.split(text.split("radq train")[0]))
        written = parse()
        named |= {scorer.partition(":")[2] for scorer in written.scorers} | {written.guide.partition(":")[0]}
        assert [str(written.out)] == recipes[f"{attribute}-3-value"].data == recipes[f"{attribute}-4-readout"].data
    assert named <= made
    assert recipes["toxicity-judge"].data != recipes["toxicity-1-perspective"].data


@pytest.mark.filterwarnings("ignore:on the evaluation data the model does not beat a constant")
def test_the_data_of_the_embedded_models_is_prepared_and_trained_on(
    toy: Path, excerpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    long_text = "A joy.<br /><br />See it " + "again " * 200
    reviews = [("train", 1, long_text), ("train", 0, "A bore, alas"), ("test", 1, "Hm.")]
    with Path("imdb.jsonl").open("w", encoding="utf-8") as file:
        for split, label, text in reviews:
            file.write(json.dumps({"split": split, "label": label, "rating": 1 + 9 * label, "text": text}) + "\n")
    sst2, jigsaw = excerpts / "sst2.tsv", excerpts / "jigsaw.csv"
    prepare = runpy.run_path(str(FOLDER / "embedded" / "prepare.py"))["main"]
    prepare(str(sst2), str(sst2), "imdb.jsonl", str(jigsaw), "data")
    rows = {
        file.stem: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in Path("data").iterdir()
    }
    assert {name: len(found) for name, found in rows.items()} == {"sentiment": 52, "sst2-dev": 50, "toxicity": 50}
    assert rows["sst2-dev"] == rows["sentiment"][:50]
    assert sum(row["sentiment"] for row in rows["sst2-dev"]) == 25
    assert sum(row["toxicity"] for row in rows["toxicity"]) == 15
    long, short = rows["sentiment"][50:]
    assert long["text"].startswith("A joy. See it again")
    assert 690 < len(long["text"]) <= 700
    assert not long["text"].endswith("agai")
    assert short == {"text": "A bore,", "sentiment": 0}
    assert all(row["text"] == row["text"].strip() != "" for found in rows.values() for row in found)
    for attribute in ("sentiment", "toxicity"):
        settings = read_yaml(FOLDER / "embedded" / f"{attribute}-1-classifier.yaml", RewardTrainingConfig)
        train(replace(settings, backbone=str(toy), num_layers=1, max_steps=1, batch_size=8, cache="cache"))
        assert Path(settings.out, "model.safetensors").is_file()
