"""GGUF files: a small one holds the model it was made of; tests/models/test_embedded.py converts a real one."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from radq.errors import ModelError, WriteError
from radq.sources.gguf import convert_gguf

NAMES = {  # of the tensors of a layer, here and in GGUF
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WORDS = ["<s>", "</s>", *"abcdefgh", "ab", "cd", "abcd"]
MERGES = ["a b", "c d", "ab cd"]


@pytest.fixture
def lm() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(lm: LlamaForCausalLM, file: Path) -> None:
    """Write a model as llama.cpp stores it: in queries and keys, the two halves of each head alternate."""
    config, writer = lm.config, gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3] + [1] * (len(WORDS) - 2))  # 3: a control token
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    weights = {name: values.numpy() for name, values in lm.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    writer.add_tensor("output.weight", weights["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for name, stored in NAMES.items():
            values = weights[f"model.layers.{layer}.{name}.weight"]
            if stored in ("attn_q", "attn_k"):
                heads = values.reshape(-1, 2, config.head_dim // 2, config.hidden_size)
                values = heads.swapaxes(1, 2).reshape(values.shape)
            writer.add_tensor(f"blk.{layer}.{stored}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_converted_file_is_the_model_it_was_made_of(dtype: torch.dtype, lm: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(lm, tmp_path / "small.gguf")
    convert_gguf(tmp_path / "small.gguf", tmp_path / "out", dtype)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert converted.dtype == dtype
    expected, found = lm.state_dict(), converted.state_dict()
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert torch.equal(values, expected[name].to(dtype)), name
    assert converted.config.rms_norm_eps == pytest.approx(lm.config.rms_norm_eps)
    text = torch.randint(len(WORDS), (2, 9))
    torch.testing.assert_close(converted.float()(text).logits, lm.to(dtype).float()(text).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("abcdabe") == ["abcd", "ab", "e"]
    assert tokenizer.eos_token == "</s>"


def test_a_file_is_read_once(lm: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(lm, tmp_path / "small.gguf")
    read, name_tensors = Mock(wraps=gguf.GGUFReader), Mock(wraps=gguf.get_tensor_name_map)
    monkeypatch.setattr(gguf, "GGUFReader", read)
    monkeypatch.setattr(gguf, "get_tensor_name_map", name_tensors)
    convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
    assert (read.call_count, name_tensors.call_count) == (1, 1)


def test_a_folder_is_written_whole_and_for_everybody(
    lm: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(lm, tmp_path / "small.gguf")
    out = tmp_path / "out"
    with monkeypatch.context() as broken:
        broken.setattr(PreTrainedTokenizerBase, "save_pretrained", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
        with pytest.raises(WriteError, match="cannot write '.*out'"):
            convert_gguf(tmp_path / "small.gguf", out)
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]  # the weights were written before
    convert_gguf(tmp_path / "small.gguf", out)
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    convert_gguf(tmp_path / "small.gguf", out, torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


@pytest.mark.parametrize("kept", [0, 0.0001, 0.02, 0.5, 0.999])
def test_a_truncated_file_is_one_line_and_leaves_nothing(kept: float, lm: LlamaForCausalLM, tmp_path: Path) -> None:
    functions = gguf.GGUFReader, gguf.get_tensor_name_map
    file = tmp_path / "small.gguf"
    write_gguf(lm, file)
    os.truncate(file, int(kept * file.stat().st_size))
    with pytest.raises(ModelError, match=r"cannot read the GGUF file '.*small\.gguf'.*it may be truncated"):
        convert_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == functions


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*small\.gguf"):
        convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
