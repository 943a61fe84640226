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

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.errors import DataError, OptionError
from radq.files import fingerprint_tensors, fingerprint_values, require_room
from radq.guides import Guide
from radq.models.loading import Wrappable, num_logits
from radq.models.reading import Reader
from radq.models.vocabulary import read_vocabulary
from radq.numerics import pad_left, pad_right, texts_per_forward
from radq.store.pieces import Piece, load_arrays, missing, save_arrays
from radq.training.arguments import choose_precision, training_device
from radq.training.config import RewardTrainingConfig
from radq.training.prefixes import Prefix, Prompts, write_prefixes
from radq.training.teacher import Teacher

PIECE = {"cpu": 256, "cuda": 2048}  # prefixes in a file: as many as take some seconds
TOKENS_PER_FORWARD = {"cpu": 8192, "cuda": 65536}  # that a teacher reads, prefixes and candidates together
WIDTH = 768  # of hidden states, up to which so many tokens are read; wider teachers read fewer, to save memory
HELD_OUT_PREFIXES = 200
UNUSED = -1  # in place of a candidate
HELD_OUT = 0  # in place of the number of a round


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
        missing = max(0, num_rows - len(rows))
        return {name: torch.from_numpy(_add_rows(name, values, missing)) for name, values in arrays.items()}

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


def _add_rows(name: str, values: np.ndarray, number: int) -> np.ndarray:
    widths = [(0, number)] + [(0, 0)] * (values.ndim - 1)
    return np.pad(values, widths, constant_values=UNUSED if name == "candidates" else 0)


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
        found = [np.arange(low, high) for low, high in zip(first, after, strict=True)]
        return order[np.concatenate([np.zeros(0, np.int64), *found]) % len(order)]


class CandidateMaker:
    """Lets the base model write prefixes, and the teacher score its candidates for their next tokens."""

    def __init__(
        self,
        lm: Wrappable,
        tokenizer: PreTrainedTokenizerBase,
        teacher: Teacher,
        prompts: Prompts,
        config: RewardTrainingConfig,
        num_known: int,
        progress: bool = False,
    ):
        """Tokens from `num_known` on are not known to teacher or student, and are no candidates."""
        check_number(config.candidates, min(num_known, num_logits(lm)))
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
        self._work: dict[str, list[float]] = {}  # seconds and numbers of tokens or candidates

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of tokens that the base model has written, and of candidates that the teacher has scored, per
        second."""
        return {name: round(number / seconds) for name, (seconds, number) in self._work.items()}

    def check_disk(self) -> None:
        """Refuse to begin if the disk has no room for the pieces that are still to be made."""
        number = self.config.rounds * self.config.num_prefixes + min(self.config.num_prefixes, HELD_OUT_PREFIXES)
        stored = sum(file.stat().st_size for file in self.folder.glob(f"{self._key}-*"))
        needed = number * self._bytes_per_prefix - stored
        hint = "make room on the disk, or lower --num-prefixes, --prefix-positions or --candidates."
        require_room(self.folder, needed, "the candidates", hint)

    @property
    def _num_positions(self) -> int:
        return min(self.config.prefix_positions, self.config.prefix_tokens)

    @property
    def _bytes_per_prefix(self) -> int:
        p, k, a = self._num_positions, self.config.candidates, len(self.teacher.attributes)
        return 4 * (self.prompts.longest + self.config.prefix_tokens + 1 + p * (1 + k * (1 + a)))

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
        found = CandidateSet.join([CandidateSet.load(piece.file) for piece in pieces])
        if not (found.candidates != UNUSED).any():
            raise DataError("the base model ends every prompt at once.", "give other --prompts.")
        return found

    def _pieces(self, round_number: int) -> list[Piece[range]]:
        """List the files of a round, with the numbers of their prefixes."""
        total = self.config.num_prefixes
        total = min(total, HELD_OUT_PREFIXES) if round_number == HELD_OUT else total
        name = "held-out" if round_number == HELD_OUT else f"round-{round_number}"
        starts = range(0, total, self.piece)
        return [
            Piece(self.folder / f"{self._key}-{name}-{n:04}.npz", range(start, min(start + self.piece, total)))
            for n, start in enumerate(starts)
        ]

    def _make_piece(
        self, round_number: int, numbers: range, make_guide: Callable[[float], Guide] | None
    ) -> CandidateSet:
        began = time.perf_counter()
        prompts = self.prompts.held_out if round_number == HELD_OUT else self.prompts.train
        seed = int(np.random.SeedSequence([self.config.seed, round_number]).generate_state(1)[0])
        half = numbers.start + len(numbers) // 2
        beta = self.config.round_beta
        parts = (
            [(numbers, None)]
            if make_guide is None
            else [
                (range(numbers.start, half), make_guide(beta)),
                (range(half, numbers.stop), make_guide(-beta)),
            ]
        )
        prefixes = [
            prefix
            for part, guide in parts
            if part
            for prefix in write_prefixes(
                self.lm, self.tokenizer, prompts, part, self.config, seed, guide, self.num_known
            )
        ]
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
            np.array([_fill(prefix.places, self._num_positions) for prefix in prefixes], np.int32),
            candidates,
            targets,
        )

    def release(self) -> None:
        """Forget the base model, when all candidates are made."""
        self.lm = None

    def _count(self, name: str, seconds: float, number: int) -> None:
        before = self._work.get(name, [0.0, 0])
        self._work[name] = [before[0] + seconds, before[1] + number]


def check_number(candidates: int, num_tokens: int) -> None:
    """Refuse more candidates than there are tokens."""
    if candidates > num_tokens:
        raise OptionError(
            f"candidates must be at most {num_tokens}, the number of tokens that base and student share, got "
            f"{candidates}.",
            "lower --candidates.",
        )


@torch.no_grad()
def find_candidates(
    lm: Wrappable, prefixes: Sequence[Prefix], num_places: int, k: int, num_known: int
) -> Int[np.ndarray, "n p k"]:
    """Find the base model's k most likely tokens at the places of each prefix.

    UNUSED stands in place of tokens from `num_known` on, and at places that a prefix does not have.
    """
    found = np.full((len(prefixes), num_places, k), UNUSED, np.int32)
    reader = Reader(lm, "logits", "base model", read_vocabulary(num_logits(lm), None))
    order = sorted((n for n, prefix in enumerate(prefixes) if prefix.places), key=lambda n: len(prefixes[n].tokens))
    longest = max((len(prefix.tokens) for prefix in prefixes), default=1)
    for rows in _chunks(order, texts_per_forward(longest * num_logits(lm), lm.device)):
        input_ids, mask = pad_left([prefixes[n].tokens for n in rows], device=lm.device)
        _, logits = reader.read_everywhere(input_ids, mask)  # (b, t, v)
        lengths = [len(prefixes[n].places) for n in rows]
        after = [place - 1 - len(prefixes[n].tokens) for n in rows for place in prefixes[n].places]  # from the end
        texts = np.repeat(np.arange(len(rows)), lengths)
        tokens = logits[texts, after].topk(k).indices.cpu().numpy()  # (places, k)
        numbers = np.concatenate([np.arange(length) for length in lengths])
        found[np.asarray(rows)[texts], numbers] = np.where(tokens < num_known, tokens, UNUSED)
    return found


def score_places(
    teacher: Teacher, prefixes: Sequence[Prefix], candidates: Int[np.ndarray, "n p k"]
) -> Float[np.ndarray, "n p k a"]:
    """Compute the teacher's rewards of the candidates at all places; 0 for those that are not used."""
    read = _score_texts if _can_read_once(teacher, prefixes, candidates) else _score_prefixes
    return np.where((candidates == UNUSED)[..., None], np.float32(0), read(teacher, prefixes, candidates))


def _can_read_once(teacher: Teacher, prefixes: Sequence[Prefix], candidates: Int[np.ndarray, "n p k"]) -> bool:
    """Whether one forward over each text gives all rewards; what a model does not know changes how it reads."""
    if not teacher.reads_once:
        return False
    known = min(vocabulary.num_known for source in teacher.sources for vocabulary in source.vocabularies)
    tokens = [token for prefix in prefixes for token in _read_part(prefix)]
    return max(tokens, default=0) < known and int(candidates.max(initial=0)) < known


def _read_part(prefix: Prefix) -> list[int]:
    """The tokens before the last place of a prefix."""
    return prefix.tokens[: max(prefix.places, default=0)]


@torch.no_grad()
def _score_texts(
    teacher: Teacher, prefixes: Sequence[Prefix], candidates: Int[np.ndarray, "n p k"]
) -> Float[np.ndarray, "n p k a"]:
    """Compute the rewards at all places by one forward over each text."""
    _, num_places, k = candidates.shape
    targets = np.zeros((*candidates.shape, len(teacher.attributes)), np.float32)
    texts = [_read_part(prefix) for prefix in prefixes]
    positions = np.array([_fill(prefix.places, num_places) for prefix in prefixes])
    order = sorted((n for n, text in enumerate(texts) if text), key=lambda n: len(texts[n]))
    for rows in _chunks(order, _count_rows(teacher, texts, num_places * k)):
        batch = pad_right([texts[n] for n in rows], device=teacher.device)
        tokens = candidates[rows].astype(np.int64).clip(min=0)
        places = (torch.from_numpy(values).to(teacher.device) for values in (positions[rows], tokens))
        targets[rows] = teacher.place_rewards(*batch, *places).float().cpu().numpy()
    return targets


def _score_prefixes(
    teacher: Teacher, prefixes: Sequence[Prefix], candidates: Int[np.ndarray, "n p k"]
) -> Float[np.ndarray, "n p k a"]:
    """Compute the rewards of each place by a forward over the tokens before it."""
    places = [(n, p) for n, prefix in enumerate(prefixes) for p in range(len(prefix.places))]
    starts = [prefix.prompt_length if teacher.reads_continuations else 0 for prefix in prefixes]
    texts = [prefixes[n].tokens[starts[n] : prefixes[n].places[p]] for n, p in places]
    rows = np.array([candidates[n, p] for n, p in places]).reshape(len(places), candidates.shape[2])
    rewards = score_rows(teacher, texts, rows)
    targets = np.zeros((*candidates.shape, len(teacher.attributes)), np.float32)
    for (n, p), found in zip(places, rewards, strict=True):
        targets[n, p] = found
    return targets


@torch.no_grad()
def score_rows(
    teacher: Teacher, texts: Sequence[Sequence[int]], candidates: Int[np.ndarray, "n k"]
) -> Float[np.ndarray, "n k a"]:
    """Compute the teacher's rewards of candidates for the next token of each text.

    Texts of similar length are read together.
    """
    n, k = candidates.shape
    rewards = np.zeros((n, k, len(teacher.attributes)))
    for rows in _chunks(sorted(range(n), key=lambda row: len(texts[row])), _count_rows(teacher, texts, k)):
        input_ids, mask = pad_left([texts[row] for row in rows], device=teacher.device)
        tokens = torch.from_numpy(candidates[rows].astype(np.int64)).clamp(min=0).to(teacher.device)
        rewards[rows] = teacher.candidate_rewards(input_ids, mask, tokens).double().cpu().numpy()
    return rewards


def _count_rows(teacher: Teacher, texts: Sequence[Sequence[int]], num_candidates: int) -> int:
    """Choose how many texts, each with so many candidates, are read together."""
    longest = max(map(len, texts), default=1)
    tokens_per_forward = TOKENS_PER_FORWARD.get(teacher.device.type, TOKENS_PER_FORWARD["cpu"])
    widths = [module.embedding_dim for module in teacher.modules() if isinstance(module, nn.Embedding)]
    wider = max(1.0, max(widths, default=WIDTH) / WIDTH)
    return max(1, int(tokens_per_forward / wider) // (longest + num_candidates))


def _chunks(items: Sequence[int], size: int) -> list[list[int]]:
    return [list(items[first : first + size]) for first in range(0, len(items), size)]


def _fill(places: list[int], number: int) -> list[int]:
    return places + [0] * (number - len(places))
