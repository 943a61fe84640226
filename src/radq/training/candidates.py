"""Candidates for the next tokens of prefixes, with the rewards that a teacher gives them.

    maker = CandidateMaker(lm, tokenizer, teacher, prompts, config, num_known)
    candidates = maker.make(round_number=1)
    candidates.batch([0, 3, 5])["candidates"]

Guidance asks about the base model's candidates after prefixes that the base model writes, so these are what a student
learns to compare. They are computed in pieces, each of which is a file of the run folder: a run that is interrupted
goes on with the next piece. Axes: n prefixes, t time, p positions, k candidates, a attributes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import RewardData
from radq.data.prompts import read_prompts
from radq.decoding.generate import generate
from radq.decoding.text import encode_prompts
from radq.errors import ContextLengthError, DataError, OptionError
from radq.files import fingerprint_tensors, fingerprint_values
from radq.guides.base import Guide
from radq.models.loading import Wrappable, num_logits
from radq.models.prefill import Turn, finish
from radq.models.reading import Reader
from radq.models.vocabulary import read_vocabulary
from radq.numerics import pad_left, pad_right, texts_per_forward
from radq.store import StoredPiece, check_room, load_arrays, missing, save_arrays
from radq.training.candidate_agreement import UNUSED, MarkedPrefix, chunks, fill, score_places
from radq.training.config import RewardTrainingConfig
from radq.training.teacher import Teacher
from radq.training.trainer_setup import choose_precision, training_device

PIECE = {"cpu": 256, "cuda": 2048}  # prefixes in a file: as many as take some seconds
HELD_OUT_PREFIXES = 200
HELD_OUT = 0  # in place of the number of a round
HELD_OUT_SHARE = 0.1  # of the prompts, if no texts are held out


@dataclass(frozen=True)
class SplitPrompts:
    """Token ids of prompts for training and of others for measuring, each in random order."""

    train: list[list[int]]
    held_out: list[list[int]]

    @property
    def longest(self) -> int:
        return max(map(len, [*self.train, *self.held_out]))


# --- prompts ---


def choose_prompts(
    config: RewardTrainingConfig,
    data: RewardData,
    eval_data: RewardData | None,
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
) -> SplitPrompts:
    """Choose prompts to train on, and other prompts to measure with.

    They come from the file of prompts, or are the beginnings of texts. Beginnings to measure with are those of
    `eval_data`. A tenth of all prompts is held out where this gives none. Prompts that leave no room for their
    continuations in the `context` of teacher and student are refused.
    """
    held_out: list[str] = []
    if config.prompts:
        train = [prompt.text for prompt in read_prompts(config.prompts)]
        rows = tokenizer(train, add_special_tokens=False, verbose=False).input_ids
        if not all(rows):
            number = 1 + [bool(row) for row in rows].index(False)
            raise DataError(f"prompt {number} of {config.prompts} has no tokens.", "remove it, or write some words.")
    else:
        train = _beginnings(data, tokenizer, config.prompt_tokens)
        others = [] if eval_data is None else _beginnings(eval_data, tokenizer, config.prompt_tokens)
        known = set(train)
        held_out = [text for text in dict.fromkeys(others) if text not in known]
    train = list(dict.fromkeys(train))
    rng = np.random.default_rng(config.seed)
    train = [train[index] for index in rng.permutation(len(train))]
    if not held_out:
        cut = max(1, round(HELD_OUT_SHARE * len(train)))
        train, held_out = train[cut:], train[:cut]
    if not train:
        raise DataError("there is one prompt alone, and some are held out.", "give two or more different --prompts.")
    prompts = SplitPrompts(
        *(encode_prompts(lm.config, tokenizer, part, config.prefix_tokens) for part in (train, held_out))
    )
    if context is not None and prompts.longest + config.prefix_tokens > context:
        raise ContextLengthError(
            f"the longest prompt has {prompts.longest} tokens; with {config.prefix_tokens} new ones it exceeds the "
            f"{context} tokens that teacher and student can read.",
            "shorten the prompts, or lower --prefix-tokens.",
        )
    return prompts


def _beginnings(data: RewardData, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> list[str]:
    """Cut off the beginnings of all texts: at most half of a short text, so that there is something to write."""
    starts, lengths = data.offsets[data.rows], data.lengths
    sizes = np.minimum(np.maximum(1, lengths // 2), prompt_tokens)
    rows: Any = [data.token_ids[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    texts = tokenizer.batch_decode(rows)
    return [text for text in texts if tokenizer(text, add_special_tokens=False).input_ids]


# --- continuations ---


def write_prefixes(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    config: RewardTrainingConfig,
    seed: int,
    num_known: int,
    numbers: range,
    guide: Guide | None = None,
) -> list[MarkedPrefix]:
    """Let the base model continue prompts.

    Prefix n depends on n, its prompt and the seed, but not on the other `numbers`. A prefix ends before a token from
    `num_known` on, which teacher or student do not know.
    """
    options: dict[str, Any] = {"top_k": config.candidates, "max_new_tokens": config.prefix_tokens}
    options |= {"seed": seed, "first_prompt": numbers.start, "kl_budget": None}  # rare prefixes are worth learning, too
    chosen = [prompts[number % len(prompts)] for number in numbers]
    prefixes = []
    generations = generate(lm, tokenizer, chosen, guide, **options)
    for number, prompt, generation in zip(numbers, chosen, generations, strict=True):
        tokens = prompt + generation.token_ids
        unknown = next((place for place, token in enumerate(tokens) if token >= num_known), len(tokens))
        written = np.arange(len(prompt), min(len(tokens) - 1, unknown) + 1)  # where the base model has chosen a token
        order = np.random.default_rng([seed, number]).permutation(written)
        places = np.sort(order[: config.prefix_positions]).tolist()
        text = tokens[: places[-1]] if places else prompt[:unknown] or [0]
        prefixes.append(MarkedPrefix(text, places, len(prompt)))
    return prefixes


# --- candidates ---


@dataclass(frozen=True)
class CandidateSet:
    """Prefixes with candidates at some of their positions, and the teacher's rewards of these candidates."""

    input_ids: np.ndarray  # (n, t) int32, padded on the right
    lengths: np.ndarray  # (n,) int32
    positions: np.ndarray  # (n, p) int32; 0 where fewer are used
    candidates: np.ndarray  # (n, p, k) int32; UNUSED where one is not known, or a position is not used
    targets: np.ndarray  # (n, p, k, a) float32

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """The lowest and the highest target of each attribute."""
        used = self.targets[self.candidates != UNUSED]  # (m, a)
        return list(zip(used.min(0).tolist(), used.max(0).tolist(), strict=True))

    def batch(self, rows: Sequence[int] | np.ndarray, num_rows: int = 1) -> dict[str, Tensor]:
        """Make a batch of prefixes, with unused ones up to `num_rows`. All batches have the same length."""
        rows = np.asarray(rows, dtype=np.int64)
        mask = np.arange(self.input_ids.shape[1]) < self.lengths[rows][:, None]
        arrays = {
            "prefix_ids": self.input_ids[rows].astype(np.int64),
            "prefix_mask": mask.astype(np.int64),
            "positions": self.positions[rows].astype(np.int64),
            "candidates": self.candidates[rows].astype(np.int64),
            "candidate_targets": self.targets[rows],
        }
        for name, values in arrays.items():
            widths = [(0, max(0, num_rows - len(rows))), *[(0, 0)] * (values.ndim - 1)]
            arrays[name] = np.pad(values, widths, constant_values=UNUSED if name == "candidates" else 0)
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    @staticmethod
    def load(file: Path) -> "CandidateSet":
        """Read the candidates of a piece."""
        return CandidateSet(**load_arrays(file, [field.name for field in fields(CandidateSet)]))

    @staticmethod
    def join(sets: Sequence["CandidateSet"]) -> "CandidateSet":
        longest = max(part.input_ids.shape[1] for part in sets)
        ids = [np.pad(part.input_ids, ((0, 0), (0, longest - part.input_ids.shape[1]))) for part in sets]
        rest = {
            field.name: np.concatenate([getattr(part, field.name) for part in sets])
            for field in fields(CandidateSet)
            if field.name != "input_ids"
        }
        return CandidateSet(np.concatenate(ids), **rest)


class CandidateFeed:
    """Gives every text of a step some prefixes to be learnt with it.

    The choice depends on seed, epoch and text alone: neither on micro-batches nor on the number of processes.
    """

    def __init__(self, candidates: CandidateSet, text_rows: np.ndarray, share: float, seed: int):
        """`text_rows` are the numbers of all texts to train on, and `share` is that of prefixes among both."""
        self.candidates, self.text_rows, self.seed = candidates, text_rows, seed
        self.per_text = share / (1 - share)

    def batch(self, texts: np.ndarray, epoch: int, num_texts: int | None = None) -> dict[str, Tensor]:
        """Make a batch of the prefixes of these texts; rows below 0 have none.

        Unused prefixes fill it up to the number that `num_texts` texts have.
        """
        most = 1 if num_texts is None else num_texts * int(np.ceil(self.per_text))
        return self.candidates.batch(self.rows(texts, epoch), max(1, most))

    def rows(self, texts: np.ndarray, epoch: int) -> np.ndarray:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.candidates))
        index = np.searchsorted(self.text_rows, texts[texts >= 0])
        first, after = (np.floor((index + n) * self.per_text + 1e-9).astype(np.int64) for n in (0, 1))
        ranges = [np.arange(low, high) for low, high in zip(first, after, strict=True)]
        return order[np.concatenate([np.zeros(0, np.int64), *ranges]) % len(order)]


class CandidateMaker:
    """Lets the base model write prefixes, and the teacher score its candidates for their next tokens."""

    def __init__(
        self,
        lm: Wrappable,
        tokenizer: PreTrainedTokenizerBase,
        teacher: Teacher,
        prompts: SplitPrompts,
        config: RewardTrainingConfig,
        num_known: int,
        progress: bool = False,
    ):
        """Tokens from `num_known` on are not known to teacher or student, and are no candidates.

        A disk without room for the candidates that are still to be made is refused.
        """
        if config.candidates > (shared := min(num_known, num_logits(lm))):
            raise OptionError(
                f"candidates must be at most {shared}, the number of tokens that base and student share, got "
                f"{config.candidates}.",
                "lower --candidates.",
            )
        self.lm: Wrappable = lm
        self.tokenizer, self.teacher, self.prompts = tokenizer, teacher, prompts
        self.config, self.num_known, self.progress = config, num_known, progress
        self.folder = Path(config.out) / "candidates"
        device = training_device(config)  # the trainer will move the models there
        self.piece = PIECE.get(device, PIECE["cpu"])
        self.precision = choose_precision(config.precision, device)
        self.base_fingerprint = fingerprint_tensors(sorted(lm.state_dict().items()))
        self.prompt_fingerprint = fingerprint_values(prompts.train, prompts.held_out)
        names = ("num_prefixes", "prefix_tokens", "prefix_positions", "candidates", "seed", "round_beta")
        settings = {name: getattr(config, name) for name in names}
        self._key = fingerprint_values(
            *(self.base_fingerprint, teacher.fingerprint, self.prompt_fingerprint),
            *(num_known, settings, self.piece, self.precision),
        )
        self._num_positions = p = min(config.prefix_positions, config.prefix_tokens)
        numbers_per_place = 1 + config.candidates * (1 + len(teacher.attributes))
        self._bytes_per_prefix = 4 * (prompts.longest + config.prefix_tokens + 1 + p * numbers_per_place)
        self._work: dict[str, list[float]] = {}  # seconds and numbers of tokens or candidates
        pieces = [piece for number in range(HELD_OUT, config.rounds + 1) for piece in self._pieces(number)]
        hint = "make room on the disk, or lower --num-prefixes, --prefix-positions or --candidates."
        check_room(self.folder, pieces, "the candidates", hint)

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of tokens that the base model has written, and of candidates that the teacher has scored, per
        second."""
        return {name: round(number / seconds) for name, (seconds, number) in self._work.items()}

    def is_made(self, round_number: int) -> bool:
        """Whether all candidates of a round are stored already."""
        return not missing(self._pieces(round_number))

    def make(self, round_number: int, make_guide: Callable[[float], Guide] | None = None) -> CandidateSet:
        """Make the candidates of a round, or load those that are stored; HELD_OUT in place of a round makes others.

        Args:
            make_guide: makes the guide of a given strength; None leaves the base model unguided.
        """
        pieces = self._pieces(round_number)
        unmade = missing(pieces)
        for piece in tqdm(unmade, desc="candidates", unit="piece", disable=not self.progress or not unmade):
            save_arrays(piece, **vars(self._make_piece(round_number, piece.contents, make_guide)))
        candidates = CandidateSet.join([CandidateSet.load(piece.file) for piece in pieces])
        if not (candidates.candidates != UNUSED).any():
            raise DataError("the base model ends every prompt at once.", "give other --prompts.")
        return candidates

    def _pieces(self, round_number: int) -> list[StoredPiece[range]]:
        """List the files of a round, with the numbers of their prefixes."""
        total = self.config.num_prefixes
        total = min(total, HELD_OUT_PREFIXES) if round_number == HELD_OUT else total
        name = "held-out" if round_number == HELD_OUT else f"round-{round_number}"
        parts = [range(start, min(start + self.piece, total)) for start in range(0, total, self.piece)]
        files = [self.folder / f"{self._key}-{name}-{n:04}.npz" for n in range(len(parts))]
        sizes = [len(part) * self._bytes_per_prefix for part in parts]
        return [StoredPiece(*piece, is_exact=False) for piece in zip(files, parts, sizes, strict=True)]

    def _make_piece(
        self, round_number: int, numbers: range, make_guide: Callable[[float], Guide] | None
    ) -> CandidateSet:
        began = time.perf_counter()
        prompts = self.prompts.held_out if round_number == HELD_OUT else self.prompts.train
        seed = int(np.random.SeedSequence([self.config.seed, round_number]).generate_state(1)[0])
        parts: list[tuple[range, Guide | None]] = [(numbers, None)]
        if make_guide is not None:
            half, beta = numbers.start + len(numbers) // 2, self.config.round_beta
            parts = [(range(numbers.start, half), make_guide(beta)), (range(half, numbers.stop), make_guide(-beta))]
        shared = self.lm, self.tokenizer, prompts, self.config, seed, self.num_known
        prefixes = [prefix for part, guide in parts if part for prefix in write_prefixes(*shared, part, guide)]
        candidates = find_candidates(self.lm, prefixes, self._num_positions, self.config.candidates, self.num_known)
        written = time.perf_counter()
        self._count("prefix_tokens_per_second", written - began, len(prefixes) * self.config.prefix_tokens)
        with self.teacher.computing_in(self.precision):
            targets = score_places(self.teacher, prefixes, candidates)
        self._count("candidates_per_second", time.perf_counter() - written, int((candidates != UNUSED).sum()))
        input_ids, mask = pad_right([prefix.tokens for prefix in prefixes])
        return CandidateSet(
            input_ids.numpy().astype(np.int32),
            mask.sum(1).numpy().astype(np.int32),
            np.array([fill(prefix.places, self._num_positions) for prefix in prefixes], np.int32),
            candidates,
            targets,
        )

    def release(self) -> None:
        """Forget the base model, when all candidates are made."""
        self.lm = None

    def _count(self, name: str, seconds: float, number: int) -> None:
        before = self._work.get(name, [0.0, 0])
        self._work[name] = [before[0] + seconds, before[1] + number]


@torch.no_grad()
def find_candidates(
    lm: Wrappable, prefixes: Sequence[MarkedPrefix], num_places: int, k: int, num_known: int
) -> Int[np.ndarray, "n p k"]:
    """Find the base model's k most likely tokens at the places of each prefix.

    UNUSED stands in place of tokens from `num_known` on, and at places that a prefix does not have.
    """
    candidates = np.full((len(prefixes), num_places, k), UNUSED, np.int32)
    reader = Reader(lm, "logits", "base model", read_vocabulary(num_logits(lm), None))
    order = sorted((n for n, prefix in enumerate(prefixes) if prefix.places), key=lambda n: len(prefixes[n].tokens))
    longest = max((len(prefix.tokens) for prefix in prefixes), default=1)
    for rows in chunks(order, texts_per_forward(longest * num_logits(lm), lm.device)):
        input_ids, mask = pad_left([prefixes[n].tokens for n in rows], device=lm.device)
        logits = finish(reader.read_everywhere(input_ids, mask, Turn()))  # (b, t, v)
        lengths = [len(prefixes[n].places) for n in rows]
        after = [place - 1 - len(prefixes[n].tokens) for n in rows for place in prefixes[n].places]  # from the end
        texts = np.repeat(np.arange(len(rows)), lengths)
        tokens = logits[texts, after].topk(k).indices.cpu().numpy()  # (places, k)
        numbers = np.concatenate([np.arange(length) for length in lengths])
        candidates[np.asarray(rows)[texts], numbers] = np.where(tokens < num_known, tokens, UNUSED)
    return candidates
