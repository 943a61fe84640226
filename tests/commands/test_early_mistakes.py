"""Mistakes in the arguments are one line, and are found before torch is imported, which takes seconds."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from radq.training.run_folder import KEY_SETTINGS

# One interpreter, in which torch and transformers cannot be imported, runs all commands and prints what they say.
PROGRAM = """
import contextlib, io, json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
from radq.cli import main

results = {}
for argv in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(argv)
        except BaseException as stop:
            code = repr(stop)
    results[json.dumps(argv)] = (code, error.getvalue())
print(json.dumps(results))
"""
GENERATE = "generate --base lm --prompt x"
TRAIN = "train --data reviews.csv --labels praise --backbone lm"
DISTILL = "distill --teacher reward --data reviews.csv --backbone lm --out new"
CALIBRATE = "calibrate reward --base lm --prompts prompts.txt"
CLASSIFY = "distill --data reviews.csv --backbone lm --out new --teacher-classifier"
MISTAKES = {
    # of values
    "generate --base lm": "there is no prompt",
    f"{GENERATE} --top-p 2": "got 2.0",
    f"{GENERATE} --top-k -1": "got -1",
    f"{GENERATE} --temperature -0.5": "got -0.5",
    f"{GENERATE} --kl-budget -2": "got -2",
    f"{GENERATE} --samples 0": "samples must be at least 1",
    f"{GENERATE} --guide reward:praise=abc": "DIR:attribute=beta",
    f"{GENERATE} --guide reward:praise=nan": "DIR:attribute=beta",
    f"{GENERATE} --guide reward": "DIR:attribute=beta",
    f"{GENERATE} --guide reward:joy=1": "it has praise, calm",
    f"{GENERATE} --guide reward:praise=strong": "praise of 'reward' is not calibrated",
    f"{GENERATE} --guide reward:praise=120%": "from 0% to 100%",
    f"{CALIBRATE} --judge oracle --attribute praise": "begin with one of",
    f"{CALIBRATE} --judge reward:reward": "give --attribute praise or calm",
    f"{CALIBRATE} --judge reward:reward --attribute joy": "it has praise, calm",
    f"{CALIBRATE} --judge linear:x --attribute praise --levels 3": "two or more different numbers",
    f"{CALIBRATE} --judge linear:x --attribute praise --levels -3 3": "levels must be more than 0",
    f"{CALIBRATE} --judge linear:x --attribute praise --max-perplexity-ratio 1": "must be more than 1",
    f"{CALIBRATE} --judge linear:x --attribute praise --plot curve.png": "end its name with .svg",
    f"{CALIBRATE} --judge linear:x --attribute praise --limit 1": "2 or more prompts",
    "calibrate embedded --prompts prompts.txt --judge linear:x": "name one, such as embedded:sentiment",
    "calibrate lm --base lm --prompts prompts.txt --judge linear:x": "not a reward model",
    f"{GENERATE} --guide embedded:joy=1": "there are sentiment, toxicity",
    f"{GENERATE} --guide experts:praise=1": "it has alpha",
    f"{GENERATE} --guide gedi:omega=1,beta=2": "it has omega, filter_p, target_p, prior",
    "score --reward reward": "there is no text",
    "train --labels praise --backbone lm --out new": "there is no data",
    "train --data reviews.csv --backbone lm --out new": "there are no labels",
    "train --data reviews.csv --pairs chosen --backbone lm --out new": "pairs must name two columns",
    "train --data reviews.csv --pairs text,other --backbone lm --out new": "has no column 'other'",
    "train --data reviews.csv --responses text --backbone lm --out new": "responses needs scores",
    f"{TRAIN} --out new --lora-rank 4 --epochs -1": "epochs must be more than 0",
    "distill --data reviews.csv --out new": "there is no teacher",
    "train --data reviews.csv --labels praise --backbone lm --base lm --out new": "base needs a teacher",
    f"{DISTILL} --rounds 2": "rounds needs a base",
    f"{DISTILL} --prompts prompts.txt": "prompts needs a base",
    f"{DISTILL} --base lm --candidates 1": "candidates must be at least 2",
    f"{DISTILL} --base lm --candidate-share 1": "candidate_share must be",
    f"{DISTILL} --base lm --teacher reward,": "separated by commas",
    "distill --data reviews.csv --out new --backbone lm --teacher experts:alpha=2": "needs a base",
    f"{CLASSIFY} classifier": "has the labels anger, joy, and it is not clear which",
    f"{CLASSIFY} unnamed": "has the labels LABEL_0, LABEL_1",
    f"{CLASSIFY} classifier:fear": "choose from anger, joy",
    f"{CLASSIFY} classifier:joy,joy": "would teach 'joy' twice",
    f"{CLASSIFY} classifier:joy=a:b": "cannot be called 'a:b'",
    f"{CLASSIFY} classifier:": "no name of a classifier",
    f"{CLASSIFY} ./nowhere:joy": "there is no folder './nowhere'",
    f"{CLASSIFY} reward:praise": "give it as --teacher",
    f"{CLASSIFY} openai:m": "`radq judge score`",
    f"{CLASSIFY} not:openai:m": "`radq judge score`",
    f"{CLASSIFY} classifier:joy --teacher reward": "both teacher and teacher_classifier",
    f"{CLASSIFY} classifier:joy --labels praise": "exclude each other",
    f"{CLASSIFY} classifier:joy --teacher-reads continuation": "there are no prompts",
    f"{CLASSIFY} classifier:joy --teacher-scores prefixes --kind v": "kind must be q",
    f"{CLASSIFY} classifier:joy --base lm --loss ce": "loss must be mse",
    f"{CLASSIFY} classifier:joy --cache-targets": "cache_targets needs a teacher of tokens",
    f"{DISTILL} --teacher-scores prefixes": "teacher_scores is for classifiers",
    "distill --teacher-classifier classifier:joy --data reviews.csv --out new": "there is no model to start from",
    "rank data reviews.csv --labels praise --backbone lm --eps -1": "eps must be",
    "rank data reviews.csv --backbone lm": "labels must name",
    "demo --samples 0": "samples must be at least 1",
    "eval measure texts.jsonl --metrics joy": "joy",
    "bench --lm gpt2-large --top-k 20 50258": "at most 50257",
    "bench --lm lm --top-k -1": "top_k must be at least 0",
    "bench --lm lm --rows 0": "rows must be at least 1",
    "bench --lm lm --rounds 2000": "at most 1,000",
    "bench --lm lm --guides q joy": "there is no guide 'joy'",
    "serve wrong.yaml": "the guide 'lables' is no guide",
    "serve --check serve.yaml --base ./nowhere": "there is no folder './nowhere'",
    "serve serve.yaml --port 65536": "port must be",
    # of files
    "generate --base lm --prompts nowhere.txt": "nowhere.txt",
    "train --data nowhere.csv --labels praise --backbone lm --out new": "there is no file 'nowhere.csv'",
    f"{DISTILL} --base lm --prompts nowhere.txt": "nowhere.txt",
    f"{DISTILL} --base lm --prompts nothing.txt": "there are no prompts",
    f"{TRAIN} --eval-data nowhere.tsv.gz --out new": "there is no file 'nowhere.tsv.gz'",
    "train --data reviews.csv --labels joy --backbone lm --out new": "it has text, praise",
    f"{TRAIN} --weight importance --out new": "no column 'importance'",
    "train --config wrong.yaml": "'lables', which is no option",
    "train-experts --data reviews.csv --labels joy --backbone lm --out new": "it has text, praise",
    "rank data reviews.csv --labels joy --backbone lm": "it has text, praise",
    "rank model reward --data reviews.csv --text review": "it has text, praise",
    "judge train --data reviews.csv --labels joy --out new": "it has text, praise",
    "judge score --judge reward:reward --data nowhere.csv": "there is no file",
    "judge score x --judge openai:m": "no rubric",
    "judge score x --judge openai:m --rubric prompts.txt": "names no scale",
    "judge score x --judge openai:m --rubric nowhere.md": "cannot be read",
    "judge score --judge reward:reward --data reviews.csv --out reviews.csv": "the file that is read",
    "judge score x --judge oracle": "begin with one of",
    "judge score --judge reward:reward": "there is no text",
    "judge score x --judge reward:reward --jobs 0": "jobs must be",
    "eval --config wrong.yaml --out new": "'lables', which is no option",
    "eval --config nowhere.yaml --out new": "nowhere.yaml",
    "eval --config no-prompts.yaml --out new": "nowhere.jsonl",
    "eval measure nowhere.jsonl": "there is no file",
    "report nowhere": "radq eval",
    # of folders
    "generate --base ./nowhere --prompt x": "there is no folder './nowhere'",
    "generate --base nowhere --prompt x": "there is no folder 'nowhere' here",
    "generate --base empty --prompt x": "it has no config.json",
    "generate --base light --prompt x": "it has no *.safetensors",
    "generate --base reward --prompt x": "a reward model, not a language model",
    f"{GENERATE} --guide ./nowhere:praise=1": "there is no folder './nowhere'",
    f"{GENERATE} --guide lm:praise=1": "not a reward model",
    "score x --reward praise-q": "there is no folder 'praise-q' here",
    "score x --reward begun": "'begun' holds an unfinished run, and no model yet. hint: finish it: the same",
    f"{GENERATE} --guide begun:praise=1": "holds an unfinished run",
    "score x --reward empty": "it has no config.json",
    "train --data reviews.csv --labels praise --backbone nowhere/lm/ --out new": "there is no folder 'nowhere/lm/'",
    "train --data reviews.csv --labels praise --init lm --out new": "not a reward model",
    f"{TRAIN} --out run": "holds a run already",
    f"{DISTILL} --base reward": "a reward model, not a language model",
    f"{DISTILL} --base ./nowhere": "there is no folder './nowhere'",
    f"{DISTILL} --teacher reward,./nowhere": "there is no folder './nowhere'",
    f"{TRAIN} --out empty/..": "holds other files",
    "distill --teacher praise-v --data reviews.csv --out new": "there is no folder 'praise-v' here",
    "rank data reviews.csv --labels praise --backbone ./nowhere": "there is no folder",
    "rank model ./nowhere --data reviews.csv": "there is no folder",
    "eval --config no-guide.yaml --out new": "there is no folder './nowhere'",
    "eval --config good.yaml --out run": "holds other files",
    "eval measure texts.jsonl --metrics perplexity --perplexity ./nowhere": "there is no folder",
    "judge train --data reviews.csv --labels praise --out run": "holds other files",
    "bench --lm ./nowhere": "there is no folder './nowhere'",
    "bench --lm lm --reward lm": "not a reward model",
    "bench --lm lm --out reviews.csv": "is a file",
    "bench --lm lm --out run": "holds other files",
    "convert weights.bin reward --backbone lm": "exists",
    "convert weights.bin new --backbone ./nowhere": "there is no folder",
}


def write_model(folder: Path, **config: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int | str, str]]:
    """The exit code and standard error of every command."""
    here = tmp_path_factory.mktemp("here")
    for name in ("lm", "light", "experts/expert", "experts/anti"):
        write_model(here / name, model_type="gpt2")
    (here / "light" / "model.safetensors").unlink()
    write_model(here / "classifier", model_type="bert", id2label={"0": "anger", "1": "joy"})
    write_model(here / "unnamed", model_type="bert")
    write_model(here / "gedi", model_type="gpt2", gedi={"codes": ["a", "b"], "scale": 1.0})
    write_model(here / "reward", model_type="radq", kind="q", attributes=["praise", "calm"])
    for name in ("empty", "run"):
        (here / name).mkdir()
    (here / "begun").mkdir()
    for name in ("config.yaml", "fingerprints.json"):
        (here / "begun" / name).write_text("{}")
    (here / "run" / "config.yaml").write_text(yaml.safe_dump(dict.fromkeys(KEY_SETTINGS, "x")))
    (here / "reviews.csv").write_text("text,praise\na good film,1\na bad film,0\n")
    (here / "texts.jsonl").write_text(json.dumps({"text": "a", "continuations": [" b", " c"]}) + "\n")
    (here / "prompts.txt").write_text("the film\n")
    (here / "nothing.txt").write_text("\n")
    sweep = {"base": "lm", "prompts": [{"file": "prompts.txt"}]}
    guide = {"folder": "./nowhere", "weights": {"praise": 1}, "beta": [1]}
    for name, changes in {
        "good": {},
        "wrong": {"lables": "praise"},
        "no-prompts": {"prompts": [{"file": "nowhere.jsonl"}]},
        "no-guide": {"guides": {"rad-q": guide}},
    }.items():
        (here / f"{name}.yaml").write_text(yaml.safe_dump(sweep | changes if name != "wrong" else changes))
    (here / "serve.yaml").write_text(yaml.safe_dump({"base": "lm", "guides": {"praise": "reward:praise=5"}}))
    before = sorted(here.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([shlex.split(command) for command in MISTAKES]),
        cwd=here,
        env=os.environ | {"HF_HUB_CACHE": str(here / "hub")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(here.rglob("*")) == before  # nothing was written
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_found_without_torch(command: str, results: dict[str, tuple[int | str, str]]) -> None:
    code, error = results[json.dumps(shlex.split(command))]
    assert (code, error.count("\n")) == (2, 1), error
    assert error.startswith("error: ")
    assert MISTAKES[command] in error
    assert " hint: " in error
