"""The models of the study, the base models that they steer, and jobs: commands that each make one file.

The claims' models follow the paper (paper/*.yaml). The contest's learn what the base model's own texts lead to:

    labels → a RAD-V over all layers, the classifier
    prompts → texts of the base model, scored at their end by the classifier → a RAD-V of values
    prefixes of the base model, and its candidates → a readout or a RAD-Q over the first layers, taught by the values

These are the recipe of the embedded sentiment model (recipes/embedded), for either attribute, and variants of it. The
baselines see as many labelled texts as the classifier, DExperts' two experts together. The embedded toxicity model has
also learnt from Perspective's scores, which baselines do not see here.
"""

import json
import math
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import yaml

from radq.errors import FULL_MEMORY
from radq.files import append_lines, atomic_file

HERE = Path(__file__).resolve().parent
EMBEDDED = HERE.parent / "recipes" / "embedded"
RADQ = [sys.executable, "-m", "radq"]
ATTEMPTS = 3  # of a job, while the memory is full
TRAINING_MEMORY, SWEEP_MEMORY, OWN_TEXTS_MEMORY = 25.0, 30.0, 30.0  # GB, about; trainings took 17 to 29


# --- jobs ---


@dataclass(frozen=True)
class Job:
    """A command that makes one file; it does not run again once the file is there."""

    name: str
    command: list[str]
    makes: str
    needs: tuple[str, ...] = ()  # files that earlier jobs make
    keep: Callable[["Job", str, float], None] | None = None  # takes what the command printed, and its seconds
    prepare: Callable[[], None] | None = None  # is called before the command, when all that it needs is there
    memory: float = 0.0  # of a GPU, in GB, about
    again: list[str] | None = None  # the command of further attempts; by default the same

    @property
    def log(self) -> Path:
        return Path("logs", f"{self.name}.log")

    @property
    def found_memory_full(self) -> bool:
        """Whether the last words of a job that failed say so."""
        return bool(FULL_MEMORY.search(self.log.read_text(errors="replace")[-2000:]))


def run_command(job: Job, log: TextIO) -> tuple[int, str]:
    """The exit code and what was printed."""
    done = subprocess.run(job.command, stdout=subprocess.PIPE, stderr=log, text=True)
    return done.returncode, done.stdout


def run_all(jobs: list[Job], at_once: int, memory: float = math.inf) -> None:
    """Run the jobs that are not done yet, earlier ones first, each as soon as the files are there that it needs.

    At most `at_once` run beside each other, and no more than `memory` holds, unless one alone needs more. A job for
    which a GPU's memory was full is tried again when another one has ended. Any other failure skips the jobs that need
    its file, and ends the study after all others.
    """
    waiting = [job for job in jobs if not Path(job.makes).exists()]
    Path("logs").mkdir(exist_ok=True)
    missing = {job.makes for job in waiting}  # files that are still to be made
    lost: set[str] = set()  # files of jobs that failed, or that were skipped
    again: list[Job] = []  # that wait for the end of another job
    attempts: Counter[str] = Counter()
    with ThreadPoolExecutor(at_once) as pool:
        running: dict[Future[bool], Job] = {}
        while waiting or running or again:
            while skipped := {job.makes for job in waiting if lost.intersection(job.needs)} - lost:
                lost |= skipped
            if not running:
                waiting, again = [*again, *waiting], []
            waiting = [job for job in waiting if job.makes not in lost]
            ready = [job for job in waiting if not missing.intersection(job.needs)]
            ready = choose_fitting(ready, list(running.values()), at_once, memory)
            running |= {pool.submit(run_one, job): job for job in ready}
            waiting = [job for job in waiting if job not in ready]
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(done)
                attempts[job.name] += 1
                waiting, again = [*again, *waiting], []
                if done.result():
                    missing.remove(job.makes)
                elif job.found_memory_full and attempts[job.name] < ATTEMPTS:
                    again.append(replace(job, command=job.again or job.command))
                else:
                    lost.add(job.makes)
    if lost:
        sys.exit(f"failed: {', '.join(job.name for job in jobs if job.makes in lost)}; see logs/.")


def choose_fitting(ready: list[Job], running: list[Job], at_once: int, memory: float) -> list[Job]:
    """Choose jobs that may begin beside those that run, earlier ones first."""
    chosen: list[Job] = []
    for job in ready:
        beside = [*running, *chosen]
        if not beside or (len(beside) < at_once and sum(one.memory for one in (*beside, job)) <= memory):
            chosen.append(job)
    return chosen


def run_one(job: Job) -> bool:
    """Return whether the job succeeded."""
    began = time.time()
    with job.log.open("a") as log:
        try:
            if job.prepare is not None:
                job.prepare()
            code, output = run_command(job, log)
        except Exception:
            traceback.print_exc(file=log)
            code, output = 1, ""
    seconds = time.time() - began
    print(f"{job.name}: {'done' if code == 0 else 'FAILED'} in {seconds:.0f} s", flush=True)
    if code == 0 and job.keep is not None:
        job.keep(job, output, seconds)
    return code == 0


def find_needed(goals: list[Job], jobs: list[Job]) -> list[Job]:
    """The jobs that make the files of `goals` which are not there, and the files that these need, in their order."""
    makers = {job.makes: job for job in jobs}
    needed: set[str] = set()
    files = [job.makes for job in goals]
    while files:
        file = files.pop()
        if file in makers and file not in needed and not Path(file).exists():
            needed.add(file)
            files += makers[file].needs
    return [job for job in jobs if job.makes in needed]


def keep_json(job: Job, output: str, seconds: float) -> None:
    write_json(job.makes, parse_printed(output))


def parse_printed(output: str) -> dict[str, Any]:
    return json.loads(output[output.index("{") :])


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    with atomic_file(file) as temporary, temporary.open("wb") as stream:
        append_lines(stream, list(rows))


def write_json(file: str | Path, content: Any) -> None:
    with atomic_file(file) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def sweep_job(run: str, settings: Callable[[], dict[str, Any]], needs: Sequence[str] = ()) -> Job:
    """A sweep, whose settings are asked for when it begins."""

    def prepare() -> None:
        Path(run).parent.mkdir(exist_ok=True)
        Path(f"{run}.yaml").write_text(yaml.safe_dump(settings(), sort_keys=False, allow_unicode=True))

    command = [*RADQ, "eval", "--config", f"{run}.yaml", "--out", run, "--cache", run, "--json"]
    return Job(run.replace("/", "-"), command, f"{run}.json", tuple(needs), keep_json, prepare, SWEEP_MEMORY)


def bench_job(name: str, makes: str, *options: Any, rows: int) -> Job:
    """Times per token, with so many texts at once."""
    numbers = ["--kl-budget", "none", "--new-tokens", 20, "--rounds", 7, "--rows", rows, "--json"]
    return Job(name, [*RADQ, "bench", *map(str, (*options, *numbers))], makes, keep=keep_json)


def run_benches(jobs: dict[Any, Job]) -> dict[Any, dict[str, Any]]:
    """Run jobs one after the other; return what they printed."""
    run_all(list(jobs.values()), 1)
    return {name: json.loads(Path(job.makes).read_text()) for name, job in jobs.items()}


# --- trainings ---


def training_job(name: str, settings: dict[str, Any]) -> Job:
    """A training that was stopped, or tried before, resumes from its last checkpoint."""
    config, text = Path(f"models/{name}.yaml"), yaml.safe_dump(settings | {"out": f"models/{name}"}, sort_keys=False)
    began = config.exists() and config.read_text() == text and Path(f"models/{name}/config.yaml").exists()
    config.write_text(text)
    command = "train-experts" if "method" in settings else "distill" if settings.get("teacher") else "train"
    again, first = ([*RADQ, command, "--config", str(config), how, "--json"] for how in ("--resume", "--overwrite"))
    models = [settings.get("init", ""), settings.get("teacher", "").partition(":")[0]]  # a teacher: DIR:name=number
    needs = [f"{model}.json" for model in models if model.startswith("models/")]
    needs += [file for file in settings["data"] if Path(file).name.startswith("own-")]
    makes, command = f"models/{name}.json", again if began else first
    return Job(name, command, makes, tuple(needs), keep=describe_model, memory=TRAINING_MEMORY, again=again)


def describe_model(job: Job, output: str, seconds: float) -> None:
    """Write models/NAME.json: command, seconds, metrics on held-out data."""
    printed = parse_printed(output)
    metrics = {name.replace("eval_", ""): printed[name] for name in printed if "eval_" in name}
    metrics = {name: metrics[name] for name in metrics if not name.endswith(("loss", "runtime", "per_second"))}
    command = " ".join(["radq", *job.command[len(RADQ) :]])
    write_json(job.makes, {"command": command, "seconds": round(seconds, 1), "metrics": metrics})


def judge(attribute: str, **settings: Any) -> dict[str, Any]:
    """RAD-V with the full backbone."""
    data = {"data": [f"data/judge-{attribute}.jsonl"], "eval_data": [f"data/judge-{attribute}-unseen.jsonl"]}
    model = {"labels": attribute, "backbone": "embedded", "kind": "v", "warmup_steps": 50, "max_length": 96}
    return data | model | settings


def experts(attribute: str, method: str, **settings: Any) -> dict[str, Any]:
    """The language models of a baseline, over all layers unless `num_layers` says otherwise."""
    model = {"labels": attribute, "method": method, "backbone": "embedded", "warmup_steps": 50}
    return {"data": [f"data/{attribute}.jsonl"]} | model | settings


JUDGES = {
    "judge-toxicity": judge("toxicity", batch_size=32, learning_rate=5e-5, epochs=4),
    "judge-sentiment": judge("sentiment", batch_size=128, learning_rate=5e-5, epochs=2),
}


# --- the models of the claims ---


def paper(name: str, **changes: Any) -> dict[str, Any]:
    """A recipe of the paper's models, with changes."""
    return yaml.safe_load((HERE / "paper" / f"{name}.yaml").read_text()) | changes


def student(attribute: str, teacher: str = "v", **changes: Any) -> dict[str, Any]:
    """RAD-Q, of labels where there is no teacher."""
    return paper(f"{attribute}-q", teacher=teacher and f"models/{attribute}-{teacher}", **changes)


SMALL_EXPERTS = {"max_length": 96, "batch_size": 64, "max_steps": 500, "learning_rate": 2e-5}
CLAIM_MODELS = {  # teachers stand before their students
    "toxicity-v": paper("toxicity-v"),
    "sentiment-v": paper("sentiment-v"),
    **JUDGES,
    "toxicity-q-labels": student("toxicity", ""),
    "sentiment-q-labels": student("sentiment", ""),
    "toxicity-q-cross-entropy": student("toxicity", "", loss="ce"),
    "toxicity-q-mlp": student("toxicity", "", head="mlp"),
    "toxicity-dexperts": experts("toxicity", "dexperts", **SMALL_EXPERTS),
    "sentiment-dexperts": experts("sentiment", "dexperts", **SMALL_EXPERTS),
    "toxicity-v-again": paper("toxicity-v", seed=1),  # shows how far apart two trainings are
    "sentiment-v-again": paper("sentiment-v", seed=1),
    "toxicity-q": student("toxicity"),
    "sentiment-q": student("sentiment"),
    "toxicity-q-no-regulariser": student("toxicity", reg_weight=0.0),
    "toxicity-q-no-baseline": student("toxicity", reg_weight=0.0, head="linear-nobaseline"),
    "toxicity-gedi": experts("toxicity", "gedi", **SMALL_EXPERTS),
    "sentiment-gedi": experts("sentiment", "gedi", **SMALL_EXPERTS),
    "toxicity-q-again": student("toxicity", "v-again", seed=1),
    "sentiment-q-again": student("sentiment", "v-again", seed=1),
}


# --- the models of the contest ---

RECIPE = "sentiment"  # the embedded model whose recipe both attributes take
CLASSIFIER = "1-classifier"  # the step that has settings of its own for each attribute
READS = {"sentiment": "text", "toxicity": "continuation"}  # what judges read, as in the paper
STRENGTH = 35.0  # of the classifier, where it guides the first tokens of texts
OMEGA = 30.0  # of GeDi where it teaches; students learn what it multiplies, whatever it is
BATCH = 128
FIRST_LAYERS = 12  # of models that do not have all
EXPERTS = {  # as many texts of BATCH as the classifier sees, of its length
    "sentiment": {"max_steps": 1080, "max_length": 128, "eval_data": ["data/sst2-dev.jsonl"]},
    "toxicity": {"max_steps": 900, "max_length": 96, "eval_share": 0.02},
}
RATES = {"": 5e-5, "-2e-5": 2e-5}  # learning rates of experts by the end of a model's name; dev prompts choose


def recipe(attribute: str, step: str, **changes: Any) -> dict[str, Any]:
    """A step towards a readout, with the data and models of earlier steps in the study's folder."""
    file = f"{attribute}-{step}.yaml" if step == CLASSIFIER else f"{RECIPE}-{step}.yaml"
    settings = yaml.safe_load((EMBEDDED / file).read_text().replace(RECIPE, attribute))
    for name in ("init", "teacher"):
        if name in settings:
            settings[name] = settings[name].replace("runs/embedded-", "models/")
    return settings | changes


def readout(attribute: str, **changes: Any) -> dict[str, Any]:
    return recipe(attribute, "4-readout", **changes)


def rad_q(attribute: str) -> dict[str, Any]:
    """RAD-Q over the first layers with LoRA, taught as the readout is."""
    settings = readout(attribute, num_layers=FIRST_LAYERS, lora_rank=16, head_learning_rate=1e-4)
    return {name: value for name, value in settings.items() if not name.startswith(("read", "backbone_dtype"))}


def readout_of_gedi(attribute: str) -> dict[str, Any]:
    """The readout taught GeDi's log-probability of the high class, under the name of GeDi's strength, omega.

    Beside the base model's candidates it reads the texts that GeDi has learnt from, so that nothing of our own models
    enters it. They are cut to about the length of guided texts.
    """
    teacher, data = f"models/{attribute}-gedi:omega={OMEGA:g}", [f"data/{attribute}.jsonl"]
    settings = readout(attribute, teacher=teacher, data=data, max_length=48)
    return {name: value for name, value in settings.items() if name != "labels"}


def baselines(attribute: str) -> dict[str, dict[str, Any]]:
    """The language models of baselines, GeDi's before those of its student."""
    models = {}
    for name, changes in {"gedi": {}, "dexperts": {}, "gedi-small": {"num_layers": FIRST_LAYERS}}.items():
        method, settings = name.removesuffix("-small"), EXPERTS[attribute] | {"batch_size": BATCH} | changes
        settings["micro_batch_size"] = BATCH // 4 if method == "gedi" else BATCH // 2  # GeDi reads texts in two classes
        settings["max_steps"] //= 2 if method == "dexperts" else 1  # of each of its two experts
        for end, rate in RATES.items():
            models[f"{attribute}-{name}{end}"] = experts(attribute, method, learning_rate=rate, **settings)
    return models


def ours(attribute: str) -> dict[str, dict[str, Any]]:
    """Our models of one attribute, teachers before students."""
    return {
        f"{attribute}-classifier": recipe(attribute, CLASSIFIER),
        f"{attribute}-value": recipe(attribute, "3-value"),
        f"{attribute}-readout": readout(attribute),
        f"{attribute}-rad-q": rad_q(attribute),
        f"{attribute}-readout-student-again": readout(attribute, seed=1),  # of the same teacher
        f"{attribute}-readout-gedi": readout_of_gedi(attribute),
    }


def order_models() -> dict[str, dict[str, Any]]:
    """All models, in the order in which they begin as soon as they can.

    The chain from the classifier to the readout is the longest, so its parts go first. Then come the slowest baselines,
    since a slow job that begins last is waited for.
    """
    first, second = (ours(attribute) for attribute in ("sentiment", "toxicity"))
    chain = {name: settings for pair in zip(first.items(), second.items(), strict=True) for name, settings in pair}
    return chain | JUDGES | baselines("sentiment") | baselines("toxicity")


CONTEST_MODELS = order_models()


def own_texts_job(attribute: str, options: Sequence[str] = ()) -> Job:
    """Texts of the base model with the classifier's score of their ends; it also guides the first tokens of some."""
    classifier, makes = f"models/{attribute}-classifier", f"data/own-{attribute}.jsonl"
    command = [sys.executable, str(EMBEDDED / "own_texts.py"), "--prompts", f"data/write-{attribute}.jsonl"]
    command += ["--attribute", attribute, "--reads", READS[attribute], "--scorers", f"reward:{classifier}"]
    command += ["--guide", f"{classifier}:{attribute}={STRENGTH:g}", "--dtype", "float16", "--out", makes, *options]
    return Job(f"own-{attribute}", command, makes, (f"{classifier}.json",), memory=OWN_TEXTS_MEMORY)


# --- base models ---

BASE_FILE = "base.json"  # names the base model of a folder
ALL_PROMPTS = 1000  # of each task
READOUT = {"reads": "base", "backbone_dtype": "bfloat16", "readout_layers": 5, "readout_width": 1024}
READOUT_RATE = 3e-4  # wider states want a smaller learning rate
FEWER_TEXTS = ("--batch-size", "2500")  # that are written together: they fill a GPU, and more only take memory


@dataclass(frozen=True)
class BaseModel:
    """The base model of a contest, by default the embedded one."""

    name: str = "embedded"
    title: str = "SmolLM2-135M-Instruct"
    folder: str = ""  # in the study's folder; empty for the embedded one
    page: str = "contest"  # the name of its page in docs
    layers: int = 30
    first_layers: int = FIRST_LAYERS  # that small models have
    prompts: int = ALL_PROMPTS  # of each task, for the test
    methods: tuple[str, ...] = ()  # that are compared; empty for all
    models: tuple[str, ...] = ()  # of the models that a method may choose, those that are trained; empty for all
    memory: float = 1.0  # of a job, as a multiple
    experts_memory: float = 1.0  # of a training of whole language models, likewise
    own_texts: tuple[str, ...] = ()  # options of the job that lets it write texts
    sweep: dict[str, Any] = field(default_factory=dict)  # settings of sweeps that differ

    def takes_part(self, method: str) -> bool:
        return not self.methods or method in self.methods

    def prepare(self) -> None:
        if self.folder and not Path(self.folder, "config.json").exists():
            sys.exit("error: the base model is missing; write it by run.py convert FILE.gguf --folder FOLDER.")

    def fit_training(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Let models other than judges read this base model; classifier, values and student become readouts of it."""
        if not self.folder or name.startswith("judge-"):
            return settings
        models = {key: self.folder for key in ("backbone", "base") if settings.get(key) == "embedded"}
        if "method" in settings:
            return settings | models | {"micro_batch_size": settings["micro_batch_size"] // 2}
        if "lora_rank" in settings:
            return settings | models | {"num_layers": self.first_layers}
        kept = {key: value for key, value in settings.items() if key != "init"}
        return kept | models | READOUT | {"backbone": self.folder, "learning_rate": READOUT_RATE}

    def fit_models(self, models: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(model for model in models if model in self.models) or models

    def fit_sweep(self, settings: dict[str, Any]) -> dict[str, Any]:
        prompts = [part | {"limit": part["limit"] * self.prompts // ALL_PROMPTS} for part in settings["prompts"]]
        return settings | self.sweep | {"prompts": prompts}

    def fit_memory(self, job: Job) -> Job:
        trains_experts = "train-experts" in job.command
        return replace(job, memory=job.memory * (self.experts_memory if trains_experts else self.memory))


CONVERTED = "base"  # the folder of a base model that is not embedded
SMOLLM2 = BaseModel()
TINYLLAMA = BaseModel(  # it has another tokenizer, and is trained for DExperts alone
    name="tinyllama",
    title="TinyLlama-1.1B-Chat",
    folder=CONVERTED,
    page="contest-1b",
    layers=22,
    first_layers=6,
    prompts=ALL_PROMPTS // 2,
    methods=("base", "readout", "rad-q", "dexperts", "asked"),
    models=("dexperts-2e-5",),  # of the two learning rates, the one for larger models
    memory=1.5,
    experts_memory=2.0,
    own_texts=("--base", CONVERTED, "--dtype", "bfloat16", *FEWER_TEXTS),
    sweep={"base": CONVERTED, "dtype": "bfloat16"},
)
BASES = {base.name: base for base in (SMOLLM2, TINYLLAMA)}


def read_base(folder: Path) -> BaseModel:
    """The base model of a contest's folder."""
    file = folder / BASE_FILE
    return BASES[json.loads(file.read_text())["base"]] if file.exists() else SMOLLM2


def claim_folder(base: BaseModel) -> None:
    """Note the base model of this folder, or refuse one that is not that of its earlier runs."""
    if Path(BASE_FILE).exists() or Path("models").exists():
        if read_base(Path()) != base:
            sys.exit(f"error: this folder holds a contest of {read_base(Path()).title}; use another.")
    else:
        write_json(BASE_FILE, {"base": base.name})
