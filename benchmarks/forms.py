"""Forms of the way from labels to a readout that learns values: which scorers, values and candidates pay.

    python benchmarks/forms.py --data polite.csv --labels polite --prompts prompts.txt --out rows.jsonl

One half of the rows teaches, the other fits two judges, of words and of states of the base model. The base model
writes texts; scorers score their ends; a value of each prefix is the score to expect; a RAD-Q readout learns the values
of next tokens and of the base model's candidates. States are computed once and kept in memory, so the sizes of the
defaults need a GPU. Each form is steered at three strengths, of which the later ones come near --perplexity.
Axes: n texts, t time, p places, k candidates, d numbers of a state.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import radq
from radq.data.prompts import read_prompts
from radq.data.tables import read_table
from radq.guides.base import Guide
from radq.judges.agreement import area_under_curve
from radq.models.loading import find_device
from radq.numerics import pad_right
from radq.training.losses import candidate_loss, difference_loss, distillation_loss, prefix_weights

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
TEXT_TOKENS, PROMPT_TOKENS, BATCH = 96, 10, 128


@dataclass
class Arguments:
    """Compare forms of the way from labels to a readout, at one perplexity."""

    data: Path
    """Table with a column text."""
    labels: str
    """Column with the labels 0 and 1."""
    prompts: Path
    """File with prompts that are unlike the data, of which some are written from and others are measured with."""
    out: Path
    """File to write: a line for each form and strength."""
    base: str = "embedded"
    """Base model."""
    forms: tuple[str, ...] = ()
    """Names of the forms to try; by default all."""
    rows: int = 2000
    """Labelled rows that teach."""
    texts: int = 8000
    """Texts that the base model writes, unless the form has fewer."""
    tokens: int = 24
    """Tokens that it writes after each prompt."""
    measured: int = 300
    """Prompts that are measured."""
    samples: int = 10
    """Texts of each of them."""
    perplexity: float = 1.2
    """The perplexity, as a multiple of that of unguided texts, at which forms are compared."""


@dataclass(frozen=True)
class Form:
    """One way from labels to a readout."""

    scorer: str = "mixed"  # states of the last token, of all tokens (mean), words, or several of them
    value: str = "ridge"  # in closed form, or mlp: steps until the error on held-out texts rises
    share: float = 1.0  # of the texts
    places: int = 4
    candidates: int = 20  # at each place; 0 learns next tokens alone
    steps: int = 1200  # of the student
    rounds: int = 1  # in the second, half of the texts are guided by the first student


FORMS = {
    "ridge": Form(),
    "mlp": Form(value="mlp"),
    "next tokens": Form(candidates=0),
    "short": Form(steps=300),
    "two rounds": Form(rounds=2),
    "small": Form(share=0.25, places=1, candidates=8, steps=500),
    "small, two rounds": Form(share=0.25, places=1, candidates=8, steps=500, rounds=2),
    "last state": Form(scorer="last"),
    "states": Form(scorer="states"),
    "words": Form(scorer="words"),
}


def normalise(states: Tensor, layers: int) -> Tensor:
    parts = states.float().unflatten(-1, (layers, -1))
    return F.rms_norm(parts, parts.shape[-1:], eps=1e-6).flatten(-2)


class Logistic:
    """A logistic regression on states, whose penalty is chosen on a sixth of the rows."""

    def __init__(self, features: Tensor, labels: Tensor):
        self.mean, self.deviation = features.mean(0), features.std(0) + 1e-3
        x, cut = (features - self.mean) / self.deviation, len(features) // 6

        def error(penalty: float) -> float:
            w = self._fit(x[cut:], labels[cut:], penalty)
            return F.binary_cross_entropy_with_logits(x[:cut] @ w[:-1] + w[-1], labels[:cut]).item()

        self.weights = self._fit(x, labels, min((3e-3, 1e-2, 3e-2, 1e-1), key=error))

    @staticmethod
    def _fit(x: Tensor, labels: Tensor, penalty: float) -> Tensor:
        w = torch.zeros(x.shape[1] + 1, device=x.device, requires_grad=True)
        optimizer = torch.optim.LBFGS([w], max_iter=60, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            error = F.binary_cross_entropy_with_logits(x @ w[:-1] + w[-1], labels) + penalty / 2 * w[:-1].square().sum()
            error.backward()
            return error

        optimizer.step(loss)  # pyright: ignore[reportArgumentType]
        return w.detach()

    def __call__(self, features: Tensor) -> Tensor:
        return (((features - self.mean) / self.deviation) @ self.weights[:-1] + self.weights[-1]).sigmoid()


class Words:
    """A logistic regression on words and pairs of words."""

    def __init__(self, texts: Sequence[str], labels: Tensor):
        self.vectors = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
        self.model = LogisticRegression(C=4, max_iter=300).fit(self.vectors.fit_transform(texts), labels.cpu().numpy())

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return torch.from_numpy(self.model.predict_proba(self.vectors.transform(texts))[:, 1]).float()


class Texts:
    """Texts with their states, side by side in memory, and perhaps with candidates for the tokens at some places."""

    def __init__(self, bench: "Bench", rows: list[list[int]], starts: list[int]):
        self.rows, self.starts, self.layers = rows, starts, len(bench.layers)
        self.written = bench.tokenizer.batch_decode(rows, skip_special_tokens=True)
        self.input_ids, self.mask = pad_right(rows, device=bench.device)
        read = bench.student.readout.read_base
        self.states = torch.cat([read(bench.lm.base_model, part) for part in self.input_ids.split(BATCH)])  # (n, t, d)
        self.places = self.candidates = self.candidate_states = None

    def features(self) -> dict[str, Any]:
        last = self.mask.sum(1) - 1
        ends = self.states[torch.arange(len(self.rows), device=last.device), last]
        counted = normalise(self.states, self.layers) * self.mask[..., None]
        means = counted.sum(1) / self.mask.sum(1, keepdim=True)
        return {"last": normalise(ends, self.layers), "mean": means, "words": self.written}

    @torch.no_grad()
    def add_candidates(self, bench: "Bench", places: int, k: int) -> None:
        """Let the base model read its k likeliest tokens at random places after the prompts."""
        random = np.random.default_rng(0)
        chosen = [
            np.sort(random.choice(np.arange(start, len(row)), places, replace=len(row) - start < places))
            for row, start in zip(self.rows, self.starts, strict=True)
        ]
        self.places = torch.from_numpy(np.stack(chosen)).to(bench.device)  # (n, p)
        tokens, states = [], []
        for ids, mask, where in zip(
            *(part.split(BATCH) for part in (self.input_ids, self.mask, self.places)), strict=True
        ):
            logits = bench.lm(input_ids=ids).logits
            best = logits.gather(1, (where - 1)[..., None].expand(-1, -1, logits.shape[-1])).topk(k).indices
            reading = bench.value_model.read(ids, mask)
            before = reading.prefix.attention_mask.sum(1) - mask.sum(1)
            tokens.append(best)
            states.append(reading.read_places(where + before[:, None], best).to(self.states.dtype))
        self.candidates, self.candidate_states = torch.cat(tokens), torch.cat(states)  # (n, p, k), (n, p, k, d)


class Ridge:
    """The expected score after each prefix, linear in its states, in closed form."""

    def __init__(self, texts: Texts, scores: Tensor):
        self.layers, size = texts.layers, texts.states.shape[-1] + 1
        weights, cut = prefix_weights(texts.mask), len(scores) // 10
        squares, products = (torch.zeros(size, n, device=scores.device) for n in (size, 1))
        for states, share, score in zip(
            *(part[cut:].split(BATCH) for part in (texts.states, weights, scores)), strict=True
        ):
            x = self._inputs(states).flatten(0, 1)
            weighted = x * share.flatten()[:, None]
            squares += weighted.T @ x
            products += weighted.T @ score[:, None].expand_as(share).reshape(-1, 1)
        errors = {}
        for penalty in PENALTIES:
            ridge = penalty * (len(scores) - cut) * torch.eye(size, device=scores.device)
            self.weights = torch.linalg.solve((squares + ridge).double(), products.double()).float()[:, 0]
            found = self(texts.states[:cut])
            errors[((found - scores[:cut, None]).square() * weights[:cut]).sum().item() / cut] = self.weights
        self.error, self.weights = min(errors), errors[min(errors)]

    def _inputs(self, states: Tensor) -> Tensor:
        return F.pad(normalise(states, self.layers), (0, 1), value=1.0)

    def __call__(self, states: Tensor) -> Tensor:
        return torch.cat([(self._inputs(part) @ self.weights).clamp(0, 1) for part in states.split(BATCH)])


class Mlp:
    """The same by a readout of RAD-V, with the weights of the smallest error on held-out texts."""

    def __init__(self, bench: "Bench", texts: Texts, scores: Tensor, every: int = 25, patience: int = 6):
        self.model = bench.fresh(bench.value_model)
        weights, cut, best, waited = prefix_weights(texts.mask), len(scores) // 10, (math.inf, {}), 0

        def loss(rows: Tensor) -> Tensor:
            found = self.model.head(self.model.readout(texts.states[rows]))[..., 0]
            return ((found - scores[rows, None]).square() * weights[rows]).sum() / len(rows)

        train = bench.optimise(self.model, lambda rows: loss(rows + cut), len(scores) - cut, 1500, falls=False)
        for step in train:
            if step % every:
                continue
            with torch.no_grad():
                error = float(np.mean([loss(part).item() for part in torch.arange(cut).split(BATCH)]))
            waited = 0 if error < best[0] else waited + 1
            if not waited:
                best = error, copy.deepcopy(bench.trained(self.model))
            if waited == patience:
                break
        self.error = best[0]
        self.model.load_state_dict(best[1], strict=False)

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Tensor:
        parts = [self.model.head(self.model.readout(part))[..., 0].clamp(0, 1) for part in states.split(BATCH)]
        return torch.cat(parts)


class Bench:
    """The base model, scorers and judges, and what forms have in common."""

    def __init__(self, arguments: Arguments):
        self.arguments, self.device = arguments, find_device("auto")
        self.lm, self.tokenizer = radq.load(arguments.base, device=self.device)
        models = (kind.from_base(arguments.base, ["score"]) for kind in (radq.RadQ, radq.RadV))
        self.student, self.value_model = (self._share_base(model) for model in models)
        self.layers = self.student.readout.layers
        rows = [
            row
            for table in read_table(arguments.data)
            for row in table[["text", arguments.labels]].itertuples(index=False)
        ]
        order = np.random.default_rng(0).permutation(len(rows))
        half = len(rows) // 2
        teaching, judging = order[: min(half, arguments.rows)], order[half:]
        self.teaching, labels = self._read_rows(rows, teaching)
        self.scorers = self._fit_scorers(labels)
        cut = len(judging) * 4 // 5
        known, wanted = self._read_rows(rows, judging[:cut])
        self.judges = {"words": Words(known.written, wanted), "mean": Logistic(known.features()["mean"], wanted)}
        unseen, wanted = self._read_rows(rows, judging[cut:])
        for name, judge in self.judges.items():
            scores = judge(unseen.features()[name]).cpu().numpy()
            print(f"judge {name}: AUC {area_under_curve(scores, wanted.cpu().numpy() > 0.5):.3f}")
        others = [
            row[:PROMPT_TOKENS] for row in self._encode([prompt.text for prompt in read_prompts(arguments.prompts)])
        ]
        inside = [row[: max(1, min(8, len(row) // 2))] for row in self.teaching.rows]
        near = [row[:8] for row in unseen.rows][: arguments.measured // 2]
        self.measured = near + others[: arguments.measured - len(near)]
        self.prompts = inside + others[len(self.measured) :]
        self.unguided: dict[str, float] = {}

    def _share_base(self, model: Any) -> Any:
        model.backbone = self.lm.base_model
        model.may_change = False
        for part in (model.readout, model.head):
            part.to(self.device, torch.float32)
        return model

    def fresh(self, model: Any) -> Any:
        """An untrained copy of a reward model, over the same base model."""
        made = copy.deepcopy(model, {id(model.backbone): model.backbone})
        torch.manual_seed(0)
        made.init_head(None)
        return made

    def trained(self, model: Any) -> dict[str, Tensor]:
        return {name: values for name, values in model.state_dict().items() if not name.startswith("backbone")}

    def optimise(
        self, model: Any, loss: Callable[[Tensor], Tensor], number: int, steps: int, falls: bool = True
    ) -> Any:
        """Take steps on random rows; yields the number of each."""
        parameters = [*model.readout.parameters(), *model.head.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95))
        random = torch.Generator().manual_seed(0)
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1, step / 50) * (1 - step / (steps + 1) if falls else 1)
            optimizer.zero_grad()
            loss(torch.randint(number, (BATCH,), generator=random).to(self.device)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 2.0)
            optimizer.step()
            yield step

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [row[:TEXT_TOKENS] for row in self.tokenizer(texts, add_special_tokens=False).input_ids]

    def _read_rows(self, rows: list[Any], chosen: np.ndarray) -> tuple[Texts, Tensor]:
        encoded = self._encode([rows[n][0].strip() for n in chosen])
        labels = torch.tensor([float(rows[n][1]) for n in chosen], device=self.device)
        return Texts(self, encoded, [0] * len(encoded)), labels

    def _fit_scorers(self, labels: Tensor) -> dict[str, list[tuple[str, Any]]]:
        features, random = self.teaching.features(), np.random.default_rng(0)
        halves = [random.permutation(len(labels))[: len(labels) // 2] for _ in range(8)]
        states = [
            (name, Logistic(features[name][half], labels[half]))
            for name, half in zip(("last", "mean") * 4, halves, strict=True)
        ]
        words = [("words", Words(self.teaching.written, labels))] * len(states)
        last = [("last", Logistic(features["last"], labels))]
        return {"last": last, "states": states, "words": words, "mixed": [*states, *words]}

    def score(self, texts: Texts, scorer: str) -> Tensor:
        features = texts.features()
        return torch.stack([judge(features[name]).to(self.device) for name, judge in self.scorers[scorer]]).mean(0)

    def write(self, number: int, guide: Guide | None = None, seed: int = 0) -> Texts:
        """Let the base model continue random prompts."""
        random = np.random.default_rng(seed)
        prompts = [self.prompts[n] for n in random.integers(len(self.prompts), size=number)]
        options: dict[str, Any] = {"max_new_tokens": self.arguments.tokens, "seed": seed, "kl_budget": None}
        found = radq.generate(self.lm, self.tokenizer, prompts, guide, batch_size=number, **options)
        pairs = ((prompt, one.token_ids[: one.num_text_tokens]) for prompt, one in zip(prompts, found, strict=True))
        kept = [(prompt, tokens) for prompt, tokens in pairs if tokens]
        return Texts(self, [prompt + tokens for prompt, tokens in kept], [len(prompt) for prompt, _ in kept])

    def teach(self, form: Form, texts: Texts, scores: Tensor) -> tuple[Any, float]:
        """Learn values of texts, and a RAD-Q from these; returns it and the held-out error of the values."""
        values: Any = Ridge(texts, scores) if form.value == "ridge" else Mlp(self, texts, scores)
        if form.candidates:
            texts.add_candidates(self, form.places, form.candidates)
        student, targets = self.fresh(self.student), values(texts.states)[..., None]
        wanted = values(texts.candidate_states)[..., None] if form.candidates else None

        def loss(rows: Tensor) -> Tensor:
            ids, mask = texts.input_ids[rows], texts.mask[rows]
            asked = {} if wanted is None else {"positions": texts.places[rows], "candidates": texts.candidates[rows]}  # pyright: ignore[reportOptionalSubscript]
            output = student(ids, mask, states=texts.states[rows], **asked)
            error = distillation_loss(output.rewards, mask, targets[rows])
            if wanted is None:
                return error
            compared = output.candidates, wanted[rows], torch.ones_like(wanted[rows][..., 0], dtype=torch.bool)
            return error + candidate_loss(*compared) + 10 * difference_loss(*compared)

        for _ in self.optimise(student, loss, len(scores), form.steps):
            pass
        return student.eval(), values.error

    def run(self, form: Form) -> tuple[Any, float]:
        number = round(self.arguments.texts * form.share)
        texts = self.write(number)
        student, error = self.teach(form, texts, self.score(texts, form.scorer))
        if form.rounds == 2:
            guide = radq.RewardGuide(student, {"score": 30.0})
            guided, half = self.write(number // 2, guide, seed=1), number // 2
            rows, starts = texts.rows[:half] + guided.rows, texts.starts[:half] + guided.starts
            order = np.random.default_rng(0).permutation(len(rows))  # of which the first are held out
            texts = Texts(self, [rows[n] for n in order], [starts[n] for n in order])
            student, error = self.teach(form, texts, self.score(texts, form.scorer))
        return student, error

    def measure(self, student: Any, beta: float) -> dict[str, float]:
        guide = None if student is None else radq.RewardGuide(student, {"score": beta})
        options: dict[str, Any] = {
            "max_new_tokens": self.arguments.tokens,
            "samples": self.arguments.samples,
            "seed": 7,
        }
        found = radq.generate(self.lm, self.tokenizer, self.measured, guide, kl_budget=None, batch_size=4096, **options)
        repeated = [prompt for prompt in self.measured for _ in range(self.arguments.samples)]
        rows = [prompt + one.token_ids[: one.num_text_tokens] for prompt, one in zip(repeated, found, strict=True)]
        features = Texts(self, rows, [0] * len(rows)).features()
        scores = {name: judge(features[name]).mean().item() for name, judge in self.judges.items()}
        perplexity = math.exp(sum(one.nll for one in found) / sum(one.num_text_tokens for one in found))
        trigrams = [
            _distinct([one.text for one in found[n :: self.arguments.samples]]) for n in range(self.arguments.samples)
        ]
        result = {
            "perplexity": perplexity,
            "trigrams": float(np.mean(trigrams)),
            "kl": float(np.mean([one.kl for one in found])),
        }
        if student is None:
            self.unguided = result
        return scores | {name: value / (self.unguided[name] if name != "kl" else 1) for name, value in result.items()}


def _distinct(texts: list[str]) -> float:
    """The share of different ones among the trigrams of all texts, one of each prompt."""
    words = [text.split() for text in texts]
    trigrams = [tuple(one[n : n + 3]) for one in words for n in range(len(one) - 2)]
    return len(set(trigrams)) / max(1, len(trigrams))


def main(arguments: Arguments) -> None:
    bench = Bench(arguments)
    rows: list[dict[str, Any]] = []

    def note(name: str, **numbers: Any) -> None:
        rows.append({"form": name, **numbers})
        print(
            " ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else str(value) for key, value in rows[-1].items()
            )
        )
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))

    note("unguided", beta=0.0, **bench.measure(None, 0.0))
    for name in arguments.forms or FORMS:
        began = time.perf_counter()
        form = replace(FORMS[name])
        student, error = bench.run(form)
        seconds, beta = time.perf_counter() - began, 30.0
        for _ in range(3):
            found = bench.measure(student, beta)
            note(name, beta=beta, **found, value_error=error, seconds=seconds, **asdict(form))
            farther = math.log(arguments.perplexity) / max(math.log(found["perplexity"]), 0.008)
            beta *= min(5.0, max(0.2, math.sqrt(farther)))  # the divergence grows with the square of β


if __name__ == "__main__":
    main(tyro.cli(Arguments))
