"""Prefixes: whatever is reused equals what is recomputed, on every family."""

import pytest
import torch
from families import FAMILIES, VOCAB, make_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModel, BloomConfig, MambaConfig, PreTrainedModel

from radq.errors import ModelError
from radq.models import kv_cache
from radq.numerics import pack_left, pack_right

BACKBONES: dict[str, PreTrainedModel] = {family: make_lm(family).base_model.double() for family in FAMILIES}
LENGTHS = [9, 3, 6]


@pytest.fixture(params=FAMILIES)
def backbone(request: pytest.FixtureRequest) -> PreTrainedModel:
    return BACKBONES[request.param]


def texts(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return tokens, mask


def last_hidden(backbone: PreTrainedModel, row: list[int]) -> Tensor:
    return backbone(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0, -1]


def expected(backbone: PreTrainedModel, rows: list[list[int]]) -> Tensor:
    return torch.stack([last_hidden(backbone, row) for row in rows])


def check(actual: Tensor, backbone: PreTrainedModel, rows: list[list[int]]) -> None:
    tolerance = 1e-9 if actual.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(actual, expected(backbone, rows), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_masks_written_here_read_like_those_of_transformers(backbone: PreTrainedModel) -> None:
    """With padding, as a captured forward over prompts reads them."""
    if not kv_cache.takes_siblings(backbone):
        pytest.skip("this family takes no masks of pairs of tokens")
    rows = texts()
    output, prefix = kv_cache.read_with_masks(backbone, *left_padded(rows))
    check(output.last_hidden_state[:, -1], backbone, rows)
    output, _ = kv_cache.extend(backbone, prefix, torch.tensor([[5], [6], [7]]))
    check(output.last_hidden_state[:, -1], backbone, [[*row, 5 + number] for number, row in enumerate(rows)])


@torch.no_grad()
def test_padding_and_extension_change_nothing(backbone: PreTrainedModel) -> None:
    rows = texts()
    output, prefix = kv_cache.start(backbone, *left_padded(rows))
    check(output.last_hidden_state[:, -1], backbone, rows)
    for token in (5, 9, 11):
        rows = [[*row, token] for row in rows]
        output, prefix = kv_cache.extend(backbone, prefix, torch.full((3, 1), token))
        check(output.last_hidden_state[:, -1], backbone, rows)


@torch.no_grad()
def test_joined_prefixes_equal_recomputing(backbone: PreTrainedModel) -> None:
    long, short, middle = texts()
    _, padded = kv_cache.start(backbone, *left_padded([long, short]))
    alone = padded.select(torch.tensor([1]))  # with the padding that the long one has left behind
    _, other = kv_cache.start(backbone, *left_padded([middle]))
    for prefixes, rows in (([alone, other, padded], [short, middle, long, short]), ([alone, other], [short, middle])):
        joined = kv_cache.join(prefixes)
        assert joined.input_ids.shape[1] == max(map(len, rows))
        for token in (5, 9):
            output, joined = kv_cache.extend(backbone, joined, torch.full((len(rows), 1), token))
            rows = [[*row, token] for row in rows]
            check(output.last_hidden_state[:, -1], backbone, rows)
    assert kv_cache.join([alone]).input_ids.tolist() == [short]


@torch.no_grad()
def test_select_and_crop_equal_recomputing(backbone: PreTrainedModel) -> None:
    rows = texts()
    _, prefix = kv_cache.start(backbone, *left_padded(rows))
    new = torch.tensor([[7], [8]])

    output, _ = kv_cache.extend(backbone, prefix.select(torch.tensor([2, 0])), new)
    check(output.last_hidden_state[:, -1], backbone, [[*rows[2], 7], [*rows[0], 8]])

    output, _ = kv_cache.extend(backbone, prefix.select(torch.tensor([0, 0, 1, 1, 2, 2])), new.repeat(3, 1))
    check(output.last_hidden_state[:, -1], backbone, [[*row, token] for row in rows for token in (7, 8)])

    output, _ = kv_cache.extend(backbone, prefix.crop(2), torch.full((3, 1), 7))
    check(output.last_hidden_state[:, -1], backbone, [[*row[:-2], 7] for row in rows])

    output, _ = kv_cache.extend(backbone, prefix, torch.full((3, 1), 7))  # the original is as it was
    check(output.last_hidden_state[:, -1], backbone, [[*row, 7] for row in rows])


@torch.no_grad()
def test_siblings_equal_separate_forwards_and_the_chosen_one_stays(backbone: PreTrainedModel) -> None:
    rows = texts()
    candidates = torch.tensor([[4, 5, 6, 7], [7, 6, 5, 4], [9, 9, 3, 30]])
    _, prefix = kv_cache.start(backbone, *left_padded(rows))
    for read in (kv_cache.read_siblings, kv_cache._read_masked, kv_cache._read_rows):
        siblings = read(backbone, prefix, candidates)
        for column in range(4):
            longer = [[*row, int(candidates[i, column])] for i, row in enumerate(rows)]
            check(siblings.hidden[:, column], backbone, longer)
        choice = torch.tensor([3, 0, 2])
        chosen = [[*row, int(candidates[i, choice[i]])] for i, row in enumerate(rows)]
        output, _ = kv_cache.extend(backbone, siblings.choose(prefix, choice)[0], torch.full((3, 1), 12))
        check(output.last_hidden_state[:, -1], backbone, [[*row, 12] for row in chosen])

        kept = torch.tensor([2, 1])
        output, _ = kv_cache.extend(
            backbone, siblings.select(kept).choose(prefix.select(kept), choice[kept])[0], torch.full((2, 1), 12)
        )
        check(output.last_hidden_state[:, -1], backbone, [[*chosen[i], 12] for i in (2, 1)])


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tested_families_take_siblings_in_one_forward(family: str) -> None:
    assert kv_cache.takes_siblings(BACKBONES[family])


@torch.no_grad()
def test_a_backbone_without_position_ids_reads_siblings_as_rows() -> None:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=4)
    bloom = AutoModel.from_config(config).eval()  # float32: in float64, BLOOM's own padding overflows
    for parameter in bloom.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)
    assert not kv_cache.takes_siblings(bloom)
    rows = texts()
    candidates = torch.tensor([[4, 5], [7, 6], [9, 3]])
    _, prefix = kv_cache.start(bloom, *left_padded(rows))
    siblings = kv_cache.read_siblings(bloom, prefix, candidates)
    check(siblings.hidden[:, 1], bloom, [[*row, int(candidates[i, 1])] for i, row in enumerate(rows)])


def test_a_recurrent_backbone_is_refused() -> None:
    mamba = AutoModel.from_config(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)).eval()
    with pytest.raises(ModelError, match="MambaModel"):
        kv_cache.start(mamba, *left_padded(texts()))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_packing_keeps_the_order_of_real_tokens(data: st.DataObject) -> None:
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=1, max_size=4))
    )
    tokens = torch.arange(mask.numel()).view_as(mask)
    right_tokens, right_mask = pack_right(tokens, mask)
    left = pack_left(tokens, mask)
    for row in range(len(mask)):
        real = tokens[row][mask[row] == 1].tolist()
        assert right_tokens[row][right_mask[row] == 1].tolist() == real
        assert right_mask[row].tolist() == sorted(right_mask[row].tolist())
        assert left.input_ids[row, : len(real)].tolist() == real
    restored = left.unpack(left.input_ids[..., None].double())
    assert restored[..., 0].long().tolist() == tokens.tolist()


def test_results_that_autocast_has_rounded_count_as_equal() -> None:
    """A teacher in float32 computes in half precision on a GPU, and padding or a mask changes the order of its sums."""
    expected = torch.linspace(-1, 1, 9)
    rounded = expected + 0.01
    assert not kv_cache.agree(rounded, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert kv_cache.agree(rounded, expected)
        assert not kv_cache.agree(expected + 0.1, expected)
