"""Reward models: rewards equal brute force on every family, and survive saving, padding, batching and bad folders."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from families import BOS, FAMILIES, VOCAB, make_number_tokenizer, make_reward
from instruments import LargestTensor
from torch import Tensor
from transformers import PreTrainedModel

from radq.errors import ContextLengthError, ModelError, OptionError
from radq.models.config import RewardModelConfig
from radq.models.kinds import RadQ, RadV
from radq.models.loading import load_causal_lm, load_config
from radq.models.reward import RewardModel
from radq.models.vocabulary import read_vocabulary
from radq.sources.hub import quiet
from radq.training.losses import baseline_loss, squared_loss

KINDS = ["q", "v"]
TEXTS = [[5, 9, 3, 12, 30, 7, 8, 22], [11, 4], [6, 6, 31, 14, 2]]


def padded(texts: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, texts)) + 1
    fill = [[0] * (width - len(text)) for text in texts]
    rows = [f + text if side == "left" else text + f for f, text in zip(fill, texts, strict=True)]
    marks = [[0] * len(f) + [1] * (width - len(f)) for f in fill]
    return torch.tensor(rows), torch.tensor(marks if side == "left" else [mark[::-1] for mark in marks])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_token_rewards_equal_brute_force(kind: str, family: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders[family])
    for side in ("left", "right"):
        ids, mask = padded(TEXTS, side)
        rewards = model.token_rewards(ids, mask)
        for row, text in enumerate(TEXTS):
            expected = torch.stack([oracle.reward(model, text[:t], text[t]) for t in range(len(text))])
            torch.testing.assert_close(rewards[row][mask[row] == 1], expected)
            assert not rewards[row][mask[row] == 0].any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_next_rewards_equal_brute_force(kind: str, family: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders[family])
    ids, mask = padded(TEXTS, "left")
    whole = model.next_rewards(ids, mask)
    assert whole.shape == (3, VOCAB, 2)
    for row, text in enumerate(TEXTS):
        expected = torch.stack([oracle.reward(model, text, token) for token in range(VOCAB)])
        torch.testing.assert_close(whole[row], expected)
    candidates = torch.tensor([[5, 6, 7], [7, 6, 5], [36, 0, 36]])
    chosen = model.next_rewards(ids, mask, candidates)
    torch.testing.assert_close(chosen, whole.gather(1, candidates[..., None].expand(-1, -1, 2)))
    torch.testing.assert_close(model.next_rewards(*padded(TEXTS, "right"), candidates), chosen)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_whole_vocabulary_in_chunks(
    kind: str, lm_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_reward(kind, lm_folders["gemma3"])
    ids, mask = padded(TEXTS, "left")
    whole = model.next_rewards(ids, mask)
    monkeypatch.setattr("radq.models.kinds.SIBLINGS_PER_FORWARD", 5)
    torch.testing.assert_close(model.next_rewards(ids, mask), whole)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_states_advance_select_and_rewind_as_if_read_anew(kind: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders["mistral"])
    ids, mask = padded(TEXTS, "left")
    candidates = torch.tensor([[4, 9, 13]] * 3)

    def check(state: Any, texts: list[list[int]]) -> Any:
        expected = torch.stack([torch.stack([oracle.reward(model, text, v) for v in (4, 9, 13)]) for text in texts])
        rewards, state = model.score(state, candidates[:1].expand(len(texts), -1))
        torch.testing.assert_close(rewards, expected)
        return state

    state = check(model.read(ids, mask), TEXTS)
    scored = state.advance(torch.tensor([9, 13, 4]))  # all of them candidates
    longer = [[*text, token] for text, token in zip(TEXTS, (9, 13, 4), strict=True)]
    scored = check(scored, longer)
    unscored = state.advance(torch.tensor([20, 13, 4]))  # one of them not
    check(unscored, [[*TEXTS[0], 20], *longer[1:]])
    check(scored.select(torch.tensor([0, 0, 1, 1, 2, 2])), [text for text in longer for _ in range(2)])
    check(scored.select(torch.tensor([1, 1, 0])), [longer[1], longer[1], longer[0]])
    selected = scored.select(torch.tensor([2, 0]))  # keeps what was scored, so that it can advance for free
    check(selected.advance(torch.tensor([4, 9])), [[*longer[2], 4], [*longer[0], 9]])
    check(scored.rewind(1), TEXTS)
    check(scored.advance(torch.tensor([7, 7, 7])).rewind(2), TEXTS)
    check(scored, longer)  # all of which left it as it was


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_text_that_begins_with_bos_gets_no_second_one(kind: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders["llama"])
    plain, mask = padded([[5, 6, 7], [8]], "left")
    begun, begun_mask = padded([[BOS, 5, 6, 7], [8]], "left")  # only the first row
    torch.testing.assert_close(model.token_rewards(begun, begun_mask)[:, -3:], model.token_rewards(plain, mask)[:, -3:])
    torch.testing.assert_close(model.next_rewards(begun, begun_mask), model.next_rewards(plain, mask))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_empty_prefix_is_bos_alone(kind: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders["gpt2"])
    expected = torch.stack([oracle.reward(model, [], token) for token in range(VOCAB)])
    torch.testing.assert_close(model.next_rewards(torch.empty(1, 0, dtype=torch.long))[0], expected)
    torch.testing.assert_close(model.next_rewards(torch.tensor([[BOS]]))[0], expected)
    mixed = model.next_rewards(torch.tensor([[0, 0], [5, 6]]), torch.tensor([[0, 0], [1, 1]]))
    torch.testing.assert_close(mixed[0], expected)


@torch.no_grad()
def test_a_model_without_bos_reads_the_text_alone(lm_folders: dict[str, Path]) -> None:
    model = make_reward("v", lm_folders["gpt2"], prepend_bos=False)
    ids, mask = padded(TEXTS, "left")
    torch.testing.assert_close(model.token_rewards(ids, mask)[1, -1], oracle.reward(model, TEXTS[1][:1], TEXTS[1][1]))
    with pytest.raises(OptionError, match="no tokens"):
        model.next_rewards(torch.tensor([[0]]), torch.tensor([[0]]))
    with pytest.raises(OptionError, match="prepend_bos"):
        make_reward("q", lm_folders["gpt2"], prepend_bos=False)


@torch.no_grad()
def test_rewards_of_a_cross_entropy_model_pass_through_sigma(lm_folders: dict[str, Path]) -> None:
    ids, mask = padded(TEXTS, "left")
    for kind in KINDS:
        plain, squashed = make_reward(kind, lm_folders["gpt2"]), make_reward(kind, lm_folders["gpt2"], loss="ce")
        torch.testing.assert_close(squashed.next_rewards(ids, mask), plain.next_rewards(ids, mask).sigmoid())
        torch.testing.assert_close(squashed(ids, mask).rewards, plain(ids, mask).rewards)  # the loss does its own


@torch.no_grad()
def test_random_tokens_give_marginals_in_their_places(lm_folders: dict[str, Path]) -> None:
    model = make_reward("q", lm_folders["llama"])
    assert isinstance(model, RadQ)
    ids, mask = padded(TEXTS, "right")
    random_tokens = torch.randint(VOCAB, ids.shape)
    marginals = model(ids, mask, random_tokens).marginals
    for row, text in enumerate(TEXTS):
        for t in range(len(text)):
            baseline = model.head.baseline(oracle.hidden(model, text[:t]))
            expected = oracle.reward(model, text[:t], int(random_tokens[row, t])) - baseline
            torch.testing.assert_close(marginals[row, t], expected)


@pytest.mark.parametrize("head", ["linear", "linear-nobaseline", "mlp"])
@torch.no_grad()
def test_all_heads_score_texts_and_next_tokens_alike(head: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward("q", lm_folders["gpt_neox"], head=head)
    ids = torch.tensor([TEXTS[0]])
    torch.testing.assert_close(
        model.token_rewards(ids)[0, -1], model.next_rewards(ids[:, :-1], None, ids[:, -1:])[0, 0]
    )


# --- saving and loading ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
@torch.no_grad()
def test_saved_and_loaded_models_agree_bit_for_bit(
    kind: str, family: str, lm_folders: dict[str, Path], tmp_path: Path
) -> None:
    model = make_reward(kind, lm_folders[family], loss="ce", response_range=(-1, 2))
    model.save_pretrained(tmp_path / "reward")
    loaded = RewardModel.from_pretrained(tmp_path / "reward")
    assert type(loaded) is type(model)
    assert loaded.config.attributes == ["nice", "rude"]
    assert loaded.config.response_range == [-1.0, 2.0]
    ids, mask = padded(TEXTS, "left")
    assert torch.equal(loaded.token_rewards(ids, mask), model.token_rewards(ids, mask))
    assert torch.equal(loaded.next_rewards(ids, mask), model.next_rewards(ids, mask))
    assert sorted(file.name for file in (tmp_path / "reward").iterdir()) == ["config.json", "model.safetensors"]
    assert str(tmp_path.parent) not in (tmp_path / "reward" / "config.json").read_text()
    type(model).from_pretrained(tmp_path / "reward")
    with pytest.raises(ModelError, match=type(model).__name__):
        (RadV if kind == "q" else RadQ).from_pretrained(tmp_path / "reward")


def test_the_tokenizer_travels_with_the_model(toy: Path, tmp_path: Path) -> None:
    model = RadQ.from_backbone(toy, attributes=["praise"])
    model.save_pretrained(tmp_path / "reward")
    loaded = RewardModel.from_pretrained(tmp_path / "reward")
    assert loaded.tokenizer is not None
    assert loaded.vocabulary == read_vocabulary(model.vocabulary.size, loaded.tokenizer)
    assert loaded.vocabulary.fingerprint == model.vocabulary.fingerprint is not None


def test_a_fingerprint_is_computed_once_and_again_for_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_number_tokenizer()
    before = read_vocabulary(VOCAB + 2, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr("radq.models.vocabulary.hashlib", None)  # nothing is hashed any more
        assert read_vocabulary(VOCAB + 2, tokenizer) == before
    tokenizer.add_tokens(["more"])
    after = read_vocabulary(VOCAB + 2, tokenizer)
    assert (before.num_tokens, after.num_tokens) == (VOCAB, VOCAB + 1)
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_embeddings_are_frozen_also_untied_ones_and_all_else_trains(
    kind: str, family: str, lm_folders: dict[str, Path], tmp_path: Path
) -> None:
    made = make_reward(kind, lm_folders[family])
    made.save_pretrained(tmp_path / "reward")
    for model in (made, RewardModel.from_pretrained(tmp_path / "reward")):
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        embeddings = {"backbone.wte.weight"} if family == "gpt2" else {"backbone.embed_tokens.weight"}
        if kind == "q" and family == "llama":
            embeddings.add("output_embedding.weight")
        assert frozen == embeddings


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
@torch.no_grad()
def test_a_truncated_backbone_is_its_first_layers(family: str, lm_folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_reward("q", lm_folders[family], num_layers=1)
    whole = make_reward("q", lm_folders[family])
    assert model.config.backbone is not None
    assert model.config.backbone.num_hidden_layers == 1
    layers = whole.backbone.h if family == "gpt2" else whole.backbone.layers
    del layers[1]
    ids = torch.tensor([TEXTS[0]])
    torch.testing.assert_close(model.token_rewards(ids), whole.token_rewards(ids))
    model.save_pretrained(tmp_path / "short")
    assert torch.equal(RewardModel.from_pretrained(tmp_path / "short").token_rewards(ids), model.token_rewards(ids))
    with pytest.raises(OptionError, match="3.*2 layers"):
        make_reward("q", lm_folders[family], num_layers=3)


@pytest.mark.parametrize("sizes", [("50GB", "2KB"), ("2KB", "50GB"), ("2KB", "4KB")])
def test_a_second_save_leaves_nothing_of_the_first(
    sizes: tuple[str, str], lm_folders: dict[str, Path], tmp_path: Path
) -> None:
    """However either is sharded; what is not the model's stays."""
    first, second = make_reward("q", lm_folders["gpt2"]), make_reward("v", lm_folders["llama"])
    first.tokenizer = make_number_tokenizer()
    first.save_pretrained(tmp_path / "reward", max_shard_size=sizes[0])
    (tmp_path / "reward" / "metrics.jsonl").write_text("{}")
    (tmp_path / "reward" / "checkpoint-1").mkdir()
    second.save_pretrained(tmp_path / "reward", max_shard_size=sizes[1])
    loaded = RewardModel.from_pretrained(tmp_path / "reward")
    assert torch.equal(loaded.token_rewards(torch.tensor(TEXTS[:1])), second.token_rewards(torch.tensor(TEXTS[:1])))
    assert loaded.tokenizer is None  # the first one's is gone
    kept = [path.name for path in (tmp_path / "reward").iterdir() if not path.name.startswith("model")]
    assert sorted(kept) == ["checkpoint-1", "config.json", "metrics.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["reward"]


def test_a_tokenizer_with_several_chat_templates_is_saved_again(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_reward("q", lm_folders["gpt2"])
    model.tokenizer = make_number_tokenizer()
    model.tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    for _ in range(2):
        model.save_pretrained(tmp_path / "reward")
    loaded = RewardModel.from_pretrained(tmp_path / "reward")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template == model.tokenizer.chat_template


def test_trained_weights_of_a_folder_are_taken(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    model, other = make_reward("v", lm_folders["gpt2"]), make_reward("v", lm_folders["gpt2"])
    with torch.no_grad():
        model.head.weight.add_(1.0)
    model.save_pretrained(tmp_path / "reward")
    other.load_trained(tmp_path / "reward")
    assert torch.equal(other.head.weight, model.head.weight)


# --- transformers' ways of loading ---


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_of_transformers_are_honoured(kind: str, lm_folders: dict[str, Path], tmp_path: Path) -> None:
    make_reward(kind, lm_folders["llama"]).save_pretrained(tmp_path / "reward")
    default = RewardModel.from_pretrained(tmp_path / "reward")
    assert default.backbone.config._attn_implementation == "sdpa"
    model = RewardModel.from_pretrained(
        tmp_path / "reward", attn_implementation="eager", dtype="float32", device_map="cpu", local_files_only=True
    )
    assert model.backbone.config._attn_implementation == "eager"
    assert model.dtype == torch.float32
    ids = torch.tensor(TEXTS[:1])
    torch.testing.assert_close(model.token_rewards(ids), default.token_rewards(ids).float(), atol=1e-4, rtol=1e-4)
    on_meta = {"": "meta"}
    with pytest.raises(ModelError, match="one device"):
        RewardModel.from_pretrained(tmp_path / "reward", device_map=on_meta)
    with pytest.raises(OptionError, match="both device"):
        RewardModel.from_pretrained(tmp_path / "reward", "cpu", device_map="cpu")
    with pytest.raises(OptionError, match="use_safetensors is False"):
        RewardModel.from_pretrained(tmp_path / "reward", use_safetensors=False)


AUTO = """
import os, sys
def check(imports, folder):
    exec(imports)
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(folder)
    assert type(config).__name__ == "RewardModelConfig", config
    from transformers import AutoModel, AutoTokenizer
    model = AutoModel.from_pretrained(folder)
    assert type(model).__name__ == "RadV", model
    assert type(AutoModel.from_config(config)).__name__ == "RadV"
    import radq
    assert isinstance(model, radq.RadV)
for imports in sys.argv[2:]:
    if "not in" not in imports:
        import torch  # once for all forks that may have it
    if os.fork() == 0:
        check(imports, sys.argv[1])
        os._exit(0)
    assert os.wait()[1] == 0, imports
"""


@pytest.mark.slow
def test_auto_classes_know_reward_models(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    """In whatever order the two libraries are imported; each order is tried in a fork of a new interpreter."""
    make_reward("v", lm_folders["gpt2"]).save_pretrained(tmp_path / "reward")
    orders = [
        "import radq; assert 'torch' not in sys.modules",
        "from transformers import AutoModel; import radq",
        "from transformers import AutoTokenizer, AutoConfig; import radq",
        "import radq; from transformers import AutoTokenizer",
    ]
    subprocess.run([sys.executable, "-c", AUTO, str(tmp_path / "reward"), *orders], check=True)


def test_a_failed_save_leaves_nothing(
    lm_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_reward("q", lm_folders["gpt2"])
    original = PreTrainedModel.save_pretrained

    def broken(self: PreTrainedModel, folder: Path, **kwargs: Any) -> None:
        original(self, folder, **kwargs)
        raise OSError("disk full")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", broken)
    with pytest.raises(OSError, match="disk full"):
        model.save_pretrained(tmp_path / "reward")
    assert not list(tmp_path.iterdir())


# --- bad folders and inputs ---


@pytest.fixture
def saved(lm_folders: dict[str, Path], tmp_path: Path) -> Path:
    make_reward("q", lm_folders["gpt2"]).save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        RewardModel.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="nowhere"):
        RadQ.from_backbone(tmp_path / "nowhere", attributes=["a"])


def test_a_missing_weight_file(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=saved.name):
        RewardModel.from_pretrained(saved)


def test_a_truncated_weight_file(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged"):
        RewardModel.from_pretrained(saved)


def test_weights_that_lack_a_tensor(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["backbone"]["n_layer"] = 3
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lack.*h\.2"):
        RewardModel.from_pretrained(saved)


def test_pickled_weights_are_not_read(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    torch.save({}, saved / "pytorch_model.bin")
    with pytest.raises(ModelError):
        RewardModel.from_pretrained(saved)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_saved_files_may_be_read_by_whom_the_umask_allows(
    umask: int, lm_folders: dict[str, Path], tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        make_reward("q", lm_folders["gpt2"]).save_pretrained(tmp_path / "reward")
    finally:
        os.umask(before)
    assert (tmp_path / "reward").stat().st_mode & 0o777 == 0o777 & ~umask
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "reward").iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
    assert "model.safetensors" in modes


def test_a_language_model_is_no_reward_model(lm_folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="'gpt2', not a reward model"):
        RewardModel.from_pretrained(lm_folders["gpt2"])


def test_a_reward_model_is_no_language_model(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    RadQ.from_backbone(lm_folders["gpt2"], attributes=["praise"]).save_pretrained(tmp_path / "reward")
    for load in (load_config, load_causal_lm):
        with pytest.raises(ModelError, match="a reward model, not a language model"):
            load(tmp_path / "reward")


def test_a_backbone_folder_without_weights(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(lm_folders["gpt2"] / "config.json", tmp_path)
    with pytest.raises(ModelError, match="holds no model: it has no"):
        RadQ.from_backbone(tmp_path, attributes=["a"])


@pytest.mark.parametrize("attributes", [[], "toxicity", ["a", "a"]])
def test_bad_attributes(attributes: Any, lm_folders: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match="attributes"):
        RadQ.from_backbone(lm_folders["gpt2"], attributes=attributes)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_longer_than_the_context(kind: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders["gpt2"])
    assert model.reader.context == 63
    full = torch.full((1, 63), 5)
    assert model.token_rewards(full).shape == (1, 63, 2)
    with pytest.raises(ContextLengthError, match="64 tokens and the 1 before them.*64"):
        model.token_rewards(torch.full((1, 64), 5))
    with pytest.raises(ContextLengthError, match="64 tokens and the 1 before them.*64"):
        model.next_rewards(torch.full((1, 64), 5))
    state = model.read(full)
    with pytest.raises(ContextLengthError):
        state.advance(torch.tensor([5]))


# --- memory ---


@pytest.mark.parametrize("head", ["linear", "linear-nobaseline", "mlp"])
def test_training_makes_no_tensor_over_positions_and_vocabulary(head: str, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    v, b, t, a = 5000, 4, 16, 2
    config = GPT2Config(vocab_size=v, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=1)
    with quiet():
        GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = RadQ.from_backbone(tmp_path, attributes=["x", "y"], head=head).train()
    ids, mask = torch.randint(v, (b, t)), torch.ones(b, t, dtype=torch.long)
    with LargestTensor() as largest:
        output = model(ids, mask, torch.randint(v, (b, t)))
        loss = squared_loss(output.rewards, mask, torch.rand(b, a)) + baseline_loss(output.marginals, mask)
        loss.backward()
    assert largest.numel <= v * 16 < b * t * a * v  # the embedding itself is the largest

    with LargestTensor() as largest, torch.no_grad():
        model.eval().next_rewards(ids, mask, torch.randint(v, (b, 20)))
    assert largest.numel < v * (16 if head == "mlp" else 1)  # W_2 E reads the embedding; the others touch k rows of it


@pytest.mark.parametrize("kind", ["q", "v"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stored_model_loads_in_half_precision(
    kind: str, dtype: torch.dtype, lm_folders: dict[str, Path], tmp_path: Path
) -> None:
    model = make_reward(kind, lm_folders["llama"]).float()
    model.save_pretrained(tmp_path / "reward")
    half = RewardModel.from_pretrained(tmp_path / "reward", dtype=dtype)
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    ids = torch.tensor([[3, 9, 4]])
    torch.testing.assert_close(half.next_rewards(ids).float(), model.next_rewards(ids), atol=0.05, rtol=0.05)


def test_response_ranges_are_one_pair_or_one_for_each_attribute(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    each = [(0, 1), (-2, 2)]
    model = make_reward("q", lm_folders["gpt2"], response_range=each)
    model.save_pretrained(tmp_path / "each")
    assert RewardModel.from_pretrained(tmp_path / "each").config.response_range == [[0.0, 1.0], [-2.0, 2.0]]
    same = RewardModelConfig(attributes=["a", "b"], response_range=[(0, 5), (0, 5)])
    assert same.response_range == [0.0, 5.0]  # as folders of one range have it
    assert same.attribute_ranges == [(0.0, 5.0), (0.0, 5.0)]
    for wrong in ([(0, 1)], (0, 1, 2), [(0, 1), (2, 1)], (1, 0), ()):
        with pytest.raises(OptionError, match="response_range must"):
            RewardModelConfig(attributes=["a", "b"], response_range=wrong)
