"""Distillation on the base's candidates: targets by brute force, losses by hand, rounds, resuming and mistakes."""

import copy
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import oracle
import pandas
import pytest
import torch
from baselines import make_guide
from families import VOCAB, make_lm, make_number_tokenizer, make_readout, make_reward
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_runs import changed, lines, losses, make_settings, run_in_two_processes, weights

from radq.cli import main
from radq.data.dataset import GlobalBatches, load_data
from radq.data.examples import DataColumns
from radq.errors import OptionError, StoppedError
from radq.guides.base import Guide
from radq.guides.reward import RewardGuide
from radq.models import kinds, kv_cache
from radq.models.kinds import RadQ, RadV
from radq.models.reward import RewardModel
from radq.models.vocabulary import Vocabulary
from radq.sources.hub import quiet
from radq.training import candidate_agreement as agreement_module
from radq.training import candidates as candidates_module
from radq.training.candidate_agreement import (
    UNUSED,
    MarkedPrefix,
    compare_rewards,
    measure_candidate_agreement,
    score_places,
    score_rows,
)
from radq.training.candidates import (
    HELD_OUT,
    CandidateFeed,
    CandidateMaker,
    CandidateSet,
    SplitPrompts,
    find_candidates,
    write_prefixes,
)
from radq.training.config import RewardTrainingConfig
from radq.training.losses import candidate_loss, difference_loss
from radq.training.reward import train
from radq.training.reward_trainer import RewardTrainer
from radq.training.run_folder import split_teachers
from radq.training.teacher import GuideSource, RewardSource, Teacher, fingerprint_model, load_teacher
from radq.training.trainer_setup import training_device

PREFIXES = [
    MarkedPrefix([5, 6, 7, 8, 9], [2, 4, 5]),
    MarkedPrefix([1, 11, 12], [3]),
    MarkedPrefix([13], []),
    MarkedPrefix([21, 22], [1, 2]),
]


def random_candidates(k: int, seed: int = 0) -> np.ndarray:
    """Candidates at the places of PREFIXES, one of which is not used."""
    rng = np.random.default_rng(seed)
    found = np.full((len(PREFIXES), 3, k), UNUSED, np.int32)
    for n, prefix in enumerate(PREFIXES):
        for p in range(len(prefix.places)):
            found[n, p] = rng.permutation(VOCAB)[:k]
    found[0, 1, 0] = UNUSED
    return found


# --- targets ---


@pytest.mark.parametrize("kind", ["v", "q"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_targets_are_the_teachers_rewards_one_by_one(kind: str, family: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders[family])
    candidates = random_candidates(5)
    targets = score_places(Teacher([[RewardSource(model)]]), PREFIXES, candidates)
    assert targets.shape == (*candidates.shape, 2)
    for n, prefix in enumerate(PREFIXES):
        for p, place in enumerate(prefix.places):
            for k, token in enumerate(candidates[n, p].tolist()):
                wanted = [0, 0] if token == UNUSED else oracle.reward(model, prefix.tokens[:place], token).tolist()
                assert targets[n, p, k].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert not targets[2].any()


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize("kind", ["q", "v"])
@pytest.mark.parametrize("make", [make_reward, make_readout], ids=["own", "readout"])
def test_a_teacher_reads_each_text_once(
    make: Callable[[str, Path], RewardModel], kind: str, family: str, lm_folders: dict[str, Path]
) -> None:
    """The rewards are those of reading the tokens before each place anew."""
    model = make(kind, lm_folders[family]).double()
    teacher, candidates = Teacher([[RewardSource(model)]]), random_candidates(5)
    assert teacher.reads_once  # tried before forwards are counted
    places = [(n, p) for n, prefix in enumerate(PREFIXES) for p in range(len(prefix.places))]
    texts = [PREFIXES[n].tokens[: PREFIXES[n].places[p]] for n, p in places]
    rows = np.array([candidates[n, p] for n, p in places])
    wanted = np.where((rows == UNUSED)[..., None], 0, score_rows(teacher, texts, rows))
    counted: list[int] = []
    model.backbone.register_forward_pre_hook(
        lambda _, __, options: counted.append(options["input_ids"].numel()), with_kwargs=True
    )
    found = score_places(teacher, PREFIXES, candidates)
    length = 5 + int(model.config.prepend_bos)  # of the longest text, with padding that of all
    branches = 3 * 5 if kind == "v" else 0  # RAD-V reads the candidates at all places, too
    assert sum(counted) == 3 * (length + branches)  # three texts have places
    np.testing.assert_allclose([found[n, p] for n, p in places], wanted, rtol=1e-5, atol=1e-6)
    assert not found[2].any()
    counted.clear()
    score_rows(teacher, texts, rows)
    assert sum(counted) == 6 * (length + branches // 3)  # places


def test_a_teacher_that_takes_no_masks_reads_each_place(
    lm_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, candidates = (
        Teacher([[RewardSource(make_reward("v", lm_folders["llama"]).double())]]),
        random_candidates(5),
    )
    wanted = score_places(teacher, PREFIXES, candidates)
    monkeypatch.setattr(kv_cache, "takes_siblings", lambda backbone: False)
    monkeypatch.setattr(kinds, "takes_siblings", lambda backbone: False)
    assert not teacher.reads_once
    np.testing.assert_allclose(score_places(teacher, PREFIXES, candidates), wanted, rtol=1e-5, atol=1e-6)


def test_many_places_are_read_in_parts(lm_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, candidates = (
        Teacher([[RewardSource(make_reward("v", lm_folders["llama"]).double())]]),
        random_candidates(5),
    )
    wanted = score_places(teacher, PREFIXES, candidates)
    for most in (3, 10):  # a place at a time, and two
        monkeypatch.setattr(kinds, "SIBLINGS_PER_FORWARD", most)
        np.testing.assert_allclose(score_places(teacher, PREFIXES, candidates), wanted, rtol=1e-6, atol=1e-7)


def test_a_wide_teacher_reads_fewer_texts_at_once(lm_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_reward("v", lm_folders["llama"]).double()
    teacher, candidates = Teacher([[RewardSource(model)]]), random_candidates(5)
    expected = score_places(teacher, PREFIXES, candidates)  # also tries what the model can do
    batches: list[int] = []
    model.backbone.register_forward_pre_hook(
        lambda _, __, options: batches.append(len(options["input_ids"])), with_kwargs=True
    )
    monkeypatch.setattr(agreement_module, "TOKENS_PER_FORWARD", {"cpu": 3 * (5 + 3 * 5)})  # for all three texts
    width = model.backbone.config.hidden_size
    for wide, wanted in ((width, [3, 3]), (width / 3, [1] * 6)):  # the texts, then their candidates
        monkeypatch.setattr(agreement_module, "WIDTH", wide)
        batches.clear()
        np.testing.assert_allclose(score_places(teacher, PREFIXES, candidates), expected, rtol=1e-6, atol=1e-7)
        assert batches == wanted


def test_tokens_that_a_teacher_does_not_know_are_not_read(lm_folders: dict[str, Path]) -> None:
    model = make_reward("q", lm_folders["llama"])
    model.vocabulary = Vocabulary(VOCAB, 30)
    prefix = MarkedPrefix([5, 33, 6], [1, 3])
    candidates = np.array([[[7, 34], [8, 9]]], np.int32)
    found = score_places(Teacher([[RewardSource(model)]]), [prefix], candidates)
    for p, place in enumerate(prefix.places):
        tokens = torch.tensor([[token for token in prefix.tokens[:place] if token < 30]])
        wanted = model.next_rewards(tokens, candidates=torch.from_numpy(candidates[:, p]).long())
        np.testing.assert_allclose(found[0, p], wanted[0].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["dexperts", "gedi"])
def test_the_target_of_a_guide_is_its_shift_per_strength(method: str) -> None:
    strength = 2.0
    guide = make_guide(method, strength=strength, **({"filter_p": 0.0} if method == "gedi" else {}))
    teacher = Teacher([[GuideSource(guide, ["strength"])]])
    candidates = random_candidates(4)
    targets = score_places(teacher, PREFIXES, candidates)
    for n, prefix in enumerate(PREFIXES):
        for p, place in enumerate(prefix.places):
            tokens = torch.tensor([prefix.tokens[:place]])
            shift = guide.advise(guide.start(tokens), torch.from_numpy(candidates[n, p, None]).long().clamp(0)).shift[0]
            wanted = np.where(candidates[n, p] == UNUSED, 0, shift.numpy() / strength)
            np.testing.assert_allclose(targets[n, p, :, 0], wanted, rtol=1e-5, atol=1e-6)


class OwnGuide(Guide):
    """A guide without `place_rewards`, which answers as another one."""

    def __init__(self, other: Guide):
        self.other, self.beta = other, other.beta

    @property
    def readers(self) -> Any:
        return self.other.readers

    def start(self, *args: Any) -> Any:
        return self.other.start(*args)

    def advise(self, *args: Any) -> Any:
        return self.other.advise(*args)

    def advance(self, *args: Any) -> Any:
        return self.other.advance(*args)


@pytest.mark.parametrize("method", ["dexperts", "gedi"])
def test_a_guide_of_ones_own_teaches_the_same(method: str) -> None:
    """It reads each place anew, so that its rewards of texts are stored."""
    guide = make_guide(method)
    sources = [GuideSource(one, ["strength"]) for one in (guide, OwnGuide(guide))]
    assert [(source.reads_once, source.is_slow) for source in sources] == [(True, False), (False, True)]
    texts, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    torch.testing.assert_close(*(source.token_rewards(texts, mask) for source in sources))
    candidates = random_candidates(4)
    found = [score_places(Teacher([[source]]), PREFIXES, candidates) for source in sources]
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["dexperts", "gedi"])
def test_a_guide_rewards_tokens_of_texts_as_candidates(method: str) -> None:
    teacher = Teacher([[GuideSource(make_guide(method), ["strength"])]])
    texts = torch.tensor([[5, 6, 7], [8, 9, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    rewards = teacher.token_rewards(texts, mask)
    for row, place in [(0, 1), (0, 2), (1, 1)]:
        wanted = teacher.candidate_rewards(
            texts[row : row + 1, :place], mask[row : row + 1, :place], texts[row, place][None, None]
        )
        torch.testing.assert_close(rewards[row, place], wanted[0, 0])
    assert rewards[1, 2].item() == 0


def test_several_teachers_teach_the_mean(lm_folders: dict[str, Path]) -> None:
    one, two = (
        RewardSource(make_reward(kind, lm_folders["llama"], response_range=limits))
        for kind, limits in [("v", [0, 1]), ("q", [-2, 0.5])]
    )
    candidates = random_candidates(3)
    found = score_places(Teacher([[one], [two]]), PREFIXES, candidates)
    wanted = [score_places(Teacher([[source]]), PREFIXES, candidates) for source in (one, two)]
    mapped = np.where(wanted[1] == 0, 0, (wanted[1] + 2) / 2.5)  # from -2 … 0.5 to 0 … 1; unused places are 0
    np.testing.assert_allclose(found, (wanted[0] + mapped) / 2, rtol=1e-5, atol=1e-6)
    teacher = Teacher([[one], [two]])
    assert teacher.ranges == [(0.0, 1.0)] * 2
    assert "(0 to 1, 0 to 1; -2 to 0.5, -2 to 0.5): all are mapped to that of the first" in teacher.describe_ranges()
    assert Teacher([[two], [two]]).describe_ranges() == ""
    second = RewardSource(two.model, ["rude"])
    texts = torch.tensor([[5, 6]])
    with torch.no_grad():
        whole = Teacher([[two]]).token_rewards(texts, torch.ones_like(texts))
        torch.testing.assert_close(Teacher([[second]]).token_rewards(texts, torch.ones_like(texts)), whole[..., 1:])
    fingerprints = {Teacher(members).fingerprint for members in ([[one]], [[two]], [[second]], [[one], [two]])}
    assert len(fingerprints) == 4
    with pytest.raises(OptionError, match="one teacher has the attributes nice, rude, another rude"):
        Teacher([[one], [second]])


def test_readouts_of_other_layers_have_other_fingerprints(lm_folders: dict[str, Path]) -> None:
    one = make_readout("q", lm_folders["llama"], num_layers=1)
    two = copy.deepcopy(one)
    assert fingerprint_model(two) == fingerprint_model(one)
    assert two.readout is not None
    two.readout.layers = (1,)  # in place of (2,), with the same weights
    text = torch.tensor([[5, 6, 7]])
    assert not torch.allclose(one.next_rewards(text), two.next_rewards(text))
    assert fingerprint_model(two) != fingerprint_model(one)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_candidates_are_the_most_likely_tokens_of_the_base(family: str) -> None:
    lm = make_lm(family).double()
    found = find_candidates(lm, PREFIXES, 3, 6, num_known=30)
    for n, prefix in enumerate(PREFIXES):
        for p, place in enumerate(prefix.places):
            best = oracle.base_logits(lm, prefix.tokens[:place]).topk(6).indices.tolist()
            assert found[n, p].tolist() == [token if token < 30 else UNUSED for token in best]
    assert (found[2] == UNUSED).all()
    assert (found[1, 1:] == UNUSED).all()


def settings_for(out: Path, **more: Any) -> RewardTrainingConfig:
    options: dict[str, Any] = {"num_prefixes": 7, "prefix_tokens": 6, "prefix_positions": 3, "candidates": 4} | more
    return RewardTrainingConfig(out=str(out), **options)


def test_prefixes_do_not_depend_on_their_pieces(tmp_path: Path) -> None:
    lm, tokenizer = make_lm("llama"), make_number_tokenizer()
    prompts, config = [[5, 6], [7], [8, 9, 10]], settings_for(tmp_path)
    whole = write_prefixes(lm, tokenizer, prompts, config, 3, VOCAB, range(7))
    parts = [write_prefixes(lm, tokenizer, prompts, config, 3, VOCAB, part) for part in (range(4), range(4, 7))]
    assert whole == parts[0] + parts[1]
    assert whole != write_prefixes(lm, tokenizer, prompts, config, 4, VOCAB, range(7))
    for number, prefix in enumerate(whole):
        prompt = prompts[number % 3]
        assert prefix.tokens[: len(prompt)] == prompt
        assert len(prompt) <= prefix.places[0] <= prefix.places[-1] == len(prefix.tokens)
        assert sorted(set(prefix.places)) == prefix.places
    for prefix in write_prefixes(lm, tokenizer, prompts, config, 3, 9, range(7)):
        assert all(token < 9 for token in prefix.tokens)  # so a student that does not know the rest can read them


# --- the student's side ---


@pytest.mark.parametrize("head", ["linear", "linear-nobaseline", "mlp"])
def test_a_student_scores_all_places_in_one_forward(head: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward("q", lm_folders["llama"], head=head)
    candidates = random_candidates(5)
    batch = as_set(candidates).batch(range(len(PREFIXES)))
    found = compare(model, batch)
    for n, prefix in enumerate(PREFIXES):
        for p, place in enumerate(prefix.places):
            tokens = torch.tensor(candidates[n, p, None]).long().clamp(0)
            wanted = model.next_rewards(torch.tensor([prefix.tokens[:place]]), candidates=tokens)[0]
            torch.testing.assert_close(found[n, p], wanted)


@torch.no_grad()
def compare(model: RewardModel, batch: dict[str, Tensor]) -> Tensor:
    positions, candidates = batch["positions"], batch["candidates"]
    return model(batch["prefix_ids"], batch["prefix_mask"], positions=positions, candidates=candidates).candidates


def as_set(candidates: np.ndarray, a: int = 2) -> CandidateSet:
    longest = max(len(prefix.tokens) for prefix in PREFIXES)
    return CandidateSet(
        np.array([prefix.tokens + [0] * (longest - len(prefix.tokens)) for prefix in PREFIXES], np.int32),
        np.array([len(prefix.tokens) for prefix in PREFIXES], np.int32),
        np.array([prefix.places + [0] * (3 - len(prefix.places)) for prefix in PREFIXES], np.int32),
        candidates,
        np.random.default_rng(1).normal(size=(*candidates.shape, a)).astype(np.float32),
    )


class Case(NamedTuple):
    rewards: Tensor  # (b, p, k, a)
    targets: Tensor
    used: Tensor  # (b, p, k)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    b, p, k, a = (draw(st.integers(1, 3)) for _ in range(4))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    rewards, targets = (torch.from_numpy(rng.normal(size=(b, p, k, a))) for _ in range(2))
    return Case(rewards, targets, torch.from_numpy(rng.random((b, p, k)) < draw(st.sampled_from([0, 0.5, 1]))))


@given(cases())
def test_losses_are_those_of_the_formulas(case: Case) -> None:
    squares, differences = [], []
    b, p, _, a = case.rewards.shape
    for row, place, attribute in np.ndindex(b, p, a):
        used = case.used[row, place]
        one, two = (values[row, place, :, attribute][used].tolist() for values in (case.rewards, case.targets))
        squares += [(x - y) ** 2 for x, y in zip(one, two, strict=True)]
        differences += [
            ((x - sum(one) / len(one)) - (y - sum(two) / len(two))) ** 2 for x, y in zip(one, two, strict=True)
        ]
    number = max(1, len(squares))
    assert candidate_loss(*case).item() == pytest.approx(sum(squares) / number)
    assert difference_loss(*case).item() == pytest.approx(sum(differences) / number)


@given(cases(), st.floats(-5, 5))
def test_a_constant_per_place_changes_no_difference(case: Case, constant: float) -> None:
    moved = case._replace(rewards=case.rewards + constant * torch.arange(case.rewards.shape[1])[:, None, None])
    assert difference_loss(*moved).item() == pytest.approx(difference_loss(*case).item(), abs=1e-9)


@given(st.integers(1, 30), st.integers(1, 9), st.sampled_from([0.1, 0.25, 0.5, 0.6, 0.75]), st.integers(0, 3))
def test_prefixes_belong_to_texts_and_are_used_evenly(num_texts: int, m: int, share: float, epoch: int) -> None:
    candidates = CandidateSet(
        np.zeros((m, 1), np.int32), np.ones(m, np.int32), np.ones((m, 1), np.int32), np.zeros((m, 1, 2), np.int32),
        np.zeros((m, 1, 2, 1), np.float32),
    )  # fmt: skip
    rows = np.arange(num_texts) * 2 + 1  # some texts are held out
    feed = CandidateFeed(candidates, rows, share, seed=0)
    whole = feed.rows(rows, epoch)
    assert len(whole) == pytest.approx(num_texts * share / (1 - share), abs=1)
    counts = [Counter(whole.tolist())[row] for row in range(m)]
    assert max(counts) - min(counts) <= 1
    order = np.random.default_rng(1).permutation(rows)
    parts = np.array_split(order, 3)
    assert sorted(row for part in parts for row in feed.rows(part, epoch).tolist()) == sorted(whole.tolist())
    padded = np.concatenate([parts[0], [-1, -1]])
    assert feed.rows(padded, epoch).tolist() == feed.rows(parts[0], epoch).tolist()
    shapes = {tuple(feed.batch(part, epoch, num_texts=len(order))["candidates"].shape) for part in parts}
    assert len(shapes) == 1


# --- agreement ---


def test_agreement_by_hand() -> None:
    student = np.array([[0.0, 1, 2], [5, 5, 5], [1, 2, 7]])[..., None]
    teacher = np.array([[0.0, 1, 2], [0, 1, 2], [4, 4, 9]])[..., None]
    used = np.array([[True] * 3, [True] * 3, [True, True, False]])
    found = compare_rewards(student, teacher, used)  # the teacher's third row does not differ
    assert found.correlation == pytest.approx([(1 + 0) / 2])
    assert found.error == pytest.approx([np.sqrt((2 + 2 * 0.25) / 8)])
    assert found.constant_error == pytest.approx([np.sqrt((2 + 2) / 8)])


@given(st.integers(0, 1000), st.integers(2, 6), st.integers(1, 4), st.integers(1, 2))
def test_agreement_is_pearsons_correlation_in_each_row(seed: int, k: int, n: int, a: int) -> None:
    rng = np.random.default_rng(seed)
    student, teacher = rng.normal(size=(2, n, k, a))
    used = np.ones((n, k), bool)
    found = compare_rewards(student, teacher, used)
    wanted = [[np.corrcoef(student[row, :, m], teacher[row, :, m])[0, 1] for m in range(a)] for row in range(n)]
    assert found.correlation == pytest.approx(np.mean(wanted, axis=0).tolist())
    moved = compare_rewards(student + rng.normal(size=(n, 1, a)), teacher, used)
    assert moved.correlation == pytest.approx(found.correlation)
    assert moved.error == pytest.approx(found.error)
    same = compare_rewards(teacher, teacher, used)
    assert same.correlation == pytest.approx([1.0] * a)
    assert same.error == [0.0] * a


def test_agreement_of_any_models(lm_folders: dict[str, Path]) -> None:
    teacher, student = make_reward("v", lm_folders["llama"]), make_reward("q", lm_folders["llama"])
    prefixes, candidates = [[5, 6, 7], [8]], torch.tensor([[3, 4, 5], [6, 7, UNUSED]])
    found = measure_candidate_agreement(student, teacher, prefixes, candidates)
    rows = list(zip(prefixes, candidates.clamp(0).tolist(), strict=True))
    rewards = [torch.stack([oracle.rewards(model, *row) for row in rows]).detach() for model in (student, teacher)]
    one, two = (found.numpy() for found in rewards)
    wanted = compare_rewards(one, two, candidates.numpy() != UNUSED)
    assert found.correlation == pytest.approx(wanted.correlation)
    assert found.error == pytest.approx(wanted.error)
    guide = RewardGuide(student, {"nice": 3.0, "rude": -1.0}, clamp=False)
    assert measure_candidate_agreement(guide, student, prefixes, candidates).correlation == pytest.approx([1.0, 1.0])
    with pytest.raises(OptionError, match="2 prefixes and 1 rows"):
        measure_candidate_agreement(student, teacher, prefixes, candidates[:1])


# --- teachers as text ---


def test_teachers_are_separated_by_commas(tmp_path: Path) -> None:
    assert split_teachers("a") == ["a"]
    assert split_teachers("a, b") == ["a", "b"]
    assert split_teachers("a:x=1,y=2,b") == ["a:x=1,y=2", "b"]
    assert split_teachers("a:x=1,b:y=2") == ["a:x=1", "b:y=2"]
    (tmp_path / "a,b").mkdir()
    assert split_teachers(str(tmp_path / "a,b")) == [str(tmp_path / "a,b")]
    with pytest.raises(OptionError, match="separated by commas"):
        split_teachers("a,,b")


# --- runs ---


@pytest.fixture(scope="session")
def teacher_folder(calm_toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A RAD-V that likes some words and dislikes others."""
    torch.manual_seed(5)
    model = RadV.from_backbone(calm_toy, attributes=["praise"])
    torch.nn.init.normal_(model.head.weight, std=0.1)
    folder = tmp_path_factory.mktemp("teacher") / "v"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(calm_toy: Path, teacher_folder: Path, tmp_path: Path) -> RewardTrainingConfig:
    return make_settings(
        tmp_path,
        64,
        calm_toy,
        teacher=str(teacher_folder),
        base=str(calm_toy),
        batch_size=8,
        max_steps=6,
        learning_rate=3e-3,
        log_steps=1,
        num_prefixes=12,
        prefix_tokens=6,
        prefix_positions=3,
        candidates=5,
        reg_weight=0.1,
    )


def run(settings: RewardTrainingConfig, **options: Any) -> dict[str, float]:
    """Train, without the warning that six steps teach nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="on the held-out texts")
        return train(settings, **options)


def test_a_student_learns_to_compare_candidates(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    longer = changed(settings, max_steps=30, num_prefixes=48, prefix_positions=6, candidates=10)
    without = run(changed(longer, candidate_share=0.0, out=str(tmp_path / "without")))
    found = run(longer)
    assert found["eval_candidate_correlation"] > without["eval_candidate_correlation"] + 0.1
    assert found["eval_candidate_error"] < 0.6 * without["eval_candidate_error"]
    assert found["eval_candidate_error"] < found["eval_constant_candidate_error"]
    evaluated = [line for line in lines(longer.out) if "eval_candidate_error" in line]
    assert evaluated[-1]["eval_candidate_correlation"] == found["eval_candidate_correlation"]
    assert found["prefix_tokens_per_second"] > 0
    assert found["candidates_per_second"] > 0

    student = RewardModel.from_pretrained(longer.out)
    held_out = read_set(longer.out, "held-out")
    places = [(n, p) for n in range(len(held_out)) for p in range(6) if held_out.positions[n, p]]
    prefixes = [held_out.input_ids[n, : held_out.positions[n, p]].tolist() for n, p in places]
    tokens = torch.from_numpy(np.stack([held_out.candidates[n, p] for n, p in places])).long()
    again = measure_candidate_agreement(student, RewardModel.from_pretrained(longer.teacher), prefixes, tokens)
    assert again.correlation == pytest.approx([found["eval_candidate_correlation"]], abs=1e-4)
    assert again.error == pytest.approx([found["eval_candidate_error"]], rel=1e-3)


def read_set(out: str, name: str) -> CandidateSet:
    files = sorted((Path(out) / "candidates").glob(f"*-{name}-*.npz"))
    return CandidateSet.join([CandidateSet.load(file) for file in files])


def test_the_loss_of_a_step_is_the_sum_of_its_parts(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    whole = changed(settings, max_steps=1, eval_share=0.0, candidate_weight=3.0, difference_weight=7.0)
    run(whole)
    run(changed(whole, candidate_share=0.0, out=str(tmp_path / "texts")))
    torch.manual_seed(settings.seed)
    model = RadQ.from_backbone(settings.backbone, ["praise"])
    assert model.tokenizer is not None
    made = read_set(whole.out, "round-1")
    feed = CandidateFeed(made, np.arange(64), 0.5, 0)
    data = load_data(settings.data, model.tokenizer, DataColumns(), 128, settings.cache)
    batch = feed.batch(data.batch(next(iter(GlobalBatches(data.lengths, 8))))["rows"].numpy(), 0)
    assert len(batch["prefix_ids"]) == 8
    rewards = compare(model, batch)
    used, targets = batch["candidates"] != UNUSED, batch["candidate_targets"]
    wanted = 3 * candidate_loss(rewards, targets, used) + 7 * difference_loss(rewards, targets, used)
    assert losses(whole.out)[0] - losses(tmp_path / "texts")[0] == pytest.approx(wanted.item(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.75])
def test_micro_batches_do_not_change_the_losses(share: float, settings: RewardTrainingConfig, tmp_path: Path) -> None:
    settings = changed(settings, batch_size=12, candidate_share=share)
    run(settings)
    run(changed(settings, micro_batch_size=5, out=str(tmp_path / "cut")))
    assert losses(tmp_path / "cut") == pytest.approx(losses(settings.out), abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # of torch's reducer
def test_two_processes_have_the_losses_of_one(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    settings = changed(settings, rounds=2)
    run(settings)
    two = changed(settings, out=str(tmp_path / "two"))
    assert run_in_two_processes(lambda: run(two)) == [0, 0]
    assert losses(two.out) == pytest.approx(losses(settings.out), abs=1e-5)


@pytest.mark.parametrize(
    ("rounds", "step"), [(2, 4), *(pytest.param(3, step, marks=pytest.mark.slow) for step in (1, 2, 3, 5))]
)
def test_a_run_that_is_stopped_in_any_round_goes_on_to_the_same_weights(
    rounds: int,
    step: int,
    settings: RewardTrainingConfig,
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = changed(settings, rounds=rounds, backbone=str(toy), micro_batch_size=4)  # with dropout
    run(settings)
    first, *later = (read_set(settings.out, f"round-{number}").candidates for number in range(1, rounds + 1))
    assert not any(np.array_equal(first, other) for other in later)
    cut = changed(settings, out=str(tmp_path / "cut"))
    usual = RewardTrainer.training_step

    def stop(self: RewardTrainer, *args: Any, **kwargs: Any) -> Tensor:
        self.saving.stop = self.state.global_step + 1 == step
        return usual(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RewardTrainer, "training_step", stop)
        with pytest.raises(StoppedError):
            run(cut)
    run(cut, resume=True)
    torch.testing.assert_close(weights(cut.out), weights(settings.out), atol=0, rtol=0)
    assert losses(cut.out) == losses(settings.out)


@pytest.mark.slow
def test_work_that_is_interrupted_goes_on_with_the_next_piece(
    settings: RewardTrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(candidates_module.PIECE, "cpu", 5)
    run(settings)
    cut = changed(settings, out=str(tmp_path / "cut"))
    made: list[range] = []
    usual = CandidateMaker._make_piece

    def make(self: CandidateMaker, number: int, numbers: range, *args: Any) -> CandidateSet:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(numbers)
        return usual(self, number, numbers, *args)

    with monkeypatch.context() as patch:
        patch.setattr(CandidateMaker, "_make_piece", make)
        with pytest.raises(KeyboardInterrupt):
            run(cut)
        kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "cut" / "candidates").iterdir()}
        assert len(kept) == 4
        made.clear()
        with pytest.warns(UserWarning, match="no checkpoint to go on from"):
            run(cut, resume=True)
    assert made == [range(5, 10), range(10, 12)]  # of the first round; 3 pieces are held out
    assert all(file.stat().st_mtime_ns == before for file, before in kept.items())
    torch.testing.assert_close(weights(cut.out), weights(settings.out), atol=0, rtol=0)


@pytest.mark.slow
def test_guides_and_several_teachers_teach(settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path) -> None:
    for name in ("expert", "anti"):
        shutil.copytree(calm_toy, tmp_path / "experts" / name)
    stored = load_file(tmp_path / "experts" / "anti" / "model.safetensors")
    moved = {name: value + 0.05 * torch.randn_like(value) for name, value in stored.items()}
    save_file(moved, tmp_path / "experts" / "anti" / "model.safetensors", metadata={"format": "pt"})
    metrics = run(changed(settings, teacher=f"{tmp_path / 'experts'}:alpha=2", max_steps=30))
    assert metrics["eval_candidate_correlation"] > 0.2
    student = RewardModel.from_pretrained(settings.out)
    assert student.config.attributes == ["alpha"]
    assert student.config.attribute_ranges == read_set(settings.out, "round-1").ranges
    settled = changed(settings, teacher=f"{tmp_path / 'experts'}:alpha=2", max_steps=3)
    outs = [changed(settled, out=str(tmp_path / way), **{way: True}) for way in ("online", "cache_targets")]
    for one in outs:
        run(one)
    assert [list(Path(one.out).glob("targets/*/*.bin")) != [] for one in outs] == [False, True]
    torch.testing.assert_close(*(weights(one.out) for one in outs))

    both = f"{settings.teacher},{settings.out}"
    with pytest.raises(OptionError, match="one teacher has the attributes praise, another alpha"):
        run(changed(settings, teacher=both, out=str(tmp_path / "both")))
    twice = changed(settings, teacher=f"{settings.teacher},{settings.teacher}", out=str(tmp_path / "twice"))
    once = changed(settings, out=str(tmp_path / "once"))
    run(twice)
    run(once)
    torch.testing.assert_close(weights(twice.out), weights(once.out))
    with pytest.raises(OptionError, match="not one RAD-V"):
        run(changed(twice, backbone="", out=str(tmp_path / "copy")))


def test_prompts_for_measuring_are_others(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("".join(f"the {noun}\n" for noun in ("film", "plot", "cast", "film")))
    run(changed(settings, prompts=str(tmp_path / "prompts.txt"), max_steps=1))
    train_set, held_out = (read_set(settings.out, name) for name in ("round-1", "held-out"))
    assert {tuple(row[:2]) for row in train_set.input_ids.tolist()}.isdisjoint(
        {tuple(row[:2]) for row in held_out.input_ids.tolist()}
    )


@pytest.mark.slow
def test_a_run_goes_on_with_its_base_and_prompts_alone(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the film\nthe plot\n")
    begun = changed(settings, prompts=str(prompts), max_steps=2)
    run(begun)
    shutil.copytree(settings.base, tmp_path / "moved")
    run(changed(begun, base=str(tmp_path / "moved")), resume=True)
    prompts.write_text("the film\nthe cast\n")
    with pytest.raises(OptionError, match="the contents of prompts changed"):
        run(begun, resume=True)
    run(begun, overwrite=True)
    assert len(list((Path(begun.out) / "candidates").iterdir())) == 2  # none of the earlier run


# --- mistakes ---


def call(settings: RewardTrainingConfig, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    """Run the command line and return its error; nothing may have been written."""
    names = ("data", "teacher", "base", "backbone", "out", "cache", "max_steps", "batch_size", "num_prefixes")
    values = {name: getattr(settings, name) for name in names} | changes
    values["data"] = settings.data[0]
    argv = [part for name, value in values.items() if value for part in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["distill", *argv]) == 2
    assert not Path(settings.out).exists()
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("error: ")
    assert "hint: " in error[-1]
    return error[-1]


def test_mistakes_are_one_line(
    settings: RewardTrainingConfig,
    lm_folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    assert "there are no prompts" in call(settings, capsys, prompts=tmp_path / "empty.txt")
    pandas.DataFrame({"prompt": ["the film", ""]}).to_json(tmp_path / "gap.jsonl", orient="records", lines=True)
    assert "prompt 2 of" in call(settings, capsys, prompts=tmp_path / "gap.jsonl")
    (tmp_path / "one.txt").write_text("the film\n")
    assert "one prompt alone" in call(settings, capsys, prompts=tmp_path / "one.txt")
    (tmp_path / "long.txt").write_text("the film\n" + "good " * 60 + "\n")
    assert "60 tokens" in call(settings, capsys, prompts=tmp_path / "long.txt")
    assert "candidates must be at most" in call(settings, capsys, candidates=1000)
    assert "has no tokenizer" in call(settings, capsys, base=lm_folders["gpt2"])
    assert "needs a base" in call(settings, capsys, base="", rounds=2)
    assert "is not a reward model" not in call(settings, capsys, teacher="./nowhere,./other")

    other = tmp_path / "other"
    with quiet():
        make_lm("gpt2").save_pretrained(other)
    make_number_tokenizer().save_pretrained(other)
    assert "vocabulary" in call(settings, capsys, base=other)
    RadV.from_backbone(other, attributes=["praise"]).save_pretrained(tmp_path / "foreign")
    assert "the vocabulary of the teacher" in call(settings, capsys, teacher=tmp_path / "foreign")

    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    said = call(settings, capsys, num_prefixes=1000)
    assert "the candidates need" in said
    assert "MiB" in said
    assert "1000 bytes are free" in said


def test_a_base_needs_a_teacher(settings: RewardTrainingConfig) -> None:
    with pytest.raises(OptionError, match="base needs a teacher"):
        train(changed(settings, teacher="", labels="praise"))


def test_the_number_of_bytes_is_that_of_the_files(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    lm, tokenizer = make_lm("llama"), make_number_tokenizer()
    torch.manual_seed(0)
    with quiet():
        lm.save_pretrained(tmp_path / "lm")
    teacher = Teacher([[RewardSource(make_reward("q", tmp_path / "lm"))]])
    config = settings_for(tmp_path / "run", num_prefixes=60)
    maker = CandidateMaker(lm, tokenizer, teacher, SplitPrompts([[5, 6], [7, 8]], [[9, 10]]), config, VOCAB)
    made = [maker.make(number) for number in (1, HELD_OUT)]
    assert [len(part) for part in made] == [60, 60]
    stored = sum(file.stat().st_size for file in (tmp_path / "run" / "candidates").iterdir())
    assert 0.6 * stored < 120 * maker._bytes_per_prefix < 1.3 * stored
    assert maker.is_made(1)


def test_pieces_and_precision_are_those_of_the_device_that_trains(
    settings: RewardTrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are on the CPU when the pieces are planned, and the trainer moves them afterwards."""
    monkeypatch.setattr(candidates_module, "PIECE", {"cpu": 5, "cuda": 12})
    chosen: list[str] = []

    def choose(wanted: str, device: str) -> str:
        chosen.append(device)
        return "float32"

    monkeypatch.setattr(candidates_module, "choose_precision", choose)
    for device, files in (("cpu", 3), ("cuda", 1)):
        monkeypatch.setattr(candidates_module, "training_device", lambda config, device=device: device)
        run(changed(settings, max_steps=1, out=str(tmp_path / device)))
        assert len(list((tmp_path / device / "candidates").glob("*-round-1-*"))) == files
    assert chosen == ["cpu", "cuda"]
    assert training_device(changed(settings, trainer={"use_cpu": True})) == "cpu"


def test_a_teacher_is_loaded_by_its_names(teacher_folder: Path) -> None:
    teacher = load_teacher(f"{teacher_folder}:praise=3")
    assert teacher.attributes == ["praise"]
    rows = score_rows(teacher, [[5, 6]], np.array([[7, 8]]))
    model = RewardModel.from_pretrained(teacher_folder)
    wanted = model.next_rewards(torch.tensor([[5, 6]]), candidates=torch.tensor([[7, 8]]))
    np.testing.assert_allclose(rows, wanted.numpy(), rtol=1e-5)
