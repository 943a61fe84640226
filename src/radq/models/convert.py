"""Conversion of public weights into reward models, and of RAD-V into a token classifier of transformers.

RAD stores a language model whose head was replaced: `model.transformer.*` and `model.lm_head.{weight,bias}`.
rad-q stores a language model and a head beside it: `model.*`, `head.lm_projection.weight` and
`head.prefix_baseline.weight`. After distillation these names begin with `student_model.`, and the tensors of the
teacher, under `teacher_model.`, are not needed.

    save_token_classifier(RewardModel.from_pretrained("reward"), "classifier")
    AutoModelForTokenClassification.from_pretrained("classifier")

This is for programs that score texts and do not know radq. The logits at a token are the outputs of the reward model's
head there. The tokenizer writes the BOS with which the reward model begins every text, so the first logits of a text
are those of the BOS and mean nothing.
"""

import copy
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from tokenizers.processors import Sequence as SequenceProcessor
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForTokenClassification, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from radq.errors import CheckpointError, ModelError, OptionError, first_line
from radq.files import MODEL_FILES, atomic_folder, require_own_folder
from radq.models.config import RewardModelConfig
from radq.models.kinds import RadQ, RadV
from radq.models.loading import load_config
from radq.models.lora import merged_weights
from radq.models.reward import RewardModel, import_kind
from radq.models.vocabulary import find_bos, read_vocabulary, writes_bos
from radq.sources.hub import quiet
from radq.sources.model_source import ModelSource, find_weight_files

Weights = dict[str, Tensor]

# The seven attributes of Jigsaw Unintended Bias, in the order of the published models.
JIGSAW = ("toxicity", "severe_toxicity", "obscene", "identity_attack", "insult", "threat", "sexual_explicit")

BACKBONE_HINT = "give the model that the checkpoint was trained from as --backbone."

# Constants that older versions of transformers wrote into checkpoints and newer versions compute.
CONSTANTS = re.compile(r"(\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|rotary_emb\.inv_freq)$")

CLASSIFIER_HEADS = ("score", "classifier")  # names of the last layer of transformers' token classifiers
# What programs such as vLLM do to the logits, so that their scores are rewards: nothing, or σ.
PROBLEMS = {"mse": "regression", "ce": "multi_label_classification"}


def convert(
    checkpoint: str | Path,
    backbone: str | Path,
    attributes: Sequence[str] | None = None,
    loss: str = "mse",
    prepend_bos: bool | None = None,
) -> RewardModel:
    """Read a checkpoint, given as a file or as the folder that holds it, as a reward model.

    Args:
        backbone: hub name or folder of the language model it was trained from; a folder may hold config.json alone.
        attributes: names of the outputs; by default those of Jigsaw if there are seven.
        loss: loss it was trained with, as `radq train --loss` names it; with "ce", rewards are σ of the outputs.
        prepend_bos: whether the reward model reads a BOS first; by default as in the public code, RAD no and rad-q yes.
    """
    weights = _unwrap(read_weights(checkpoint))
    source = ModelSource.find(backbone)
    config, tokenizer = load_config(source), source.find_tokenizer()
    kind, head = _read_head(weights)
    if kind == "q":
        config.tie_word_embeddings = _is_tied(weights, config)
    reward_config = RewardModelConfig(
        kind=kind,
        attributes=_name_attributes(attributes, len(head["head.weight"])),
        head="linear" if "head.baseline_weight" in head else "linear-nobaseline",
        backbone=config,
        loss=loss,
        prepend_bos=(kind == "q") if prepend_bos is None else prepend_bos,
        bos_token_id=find_bos(config, tokenizer),
        vocabulary=read_vocabulary(config.vocab_size, tokenizer),
    )
    with no_init_weights():
        model = import_kind(kind)(reward_config)
    model.to(head["head.weight"].dtype)  # pyright: ignore[reportArgumentType]
    tensors = {**head, **_read_backbone(weights, config)}
    if isinstance(model, RadQ) and model.output_embedding is not None and "model.lm_head.weight" in weights:
        tensors["output_embedding.weight"] = weights["model.lm_head.weight"]
    _load(model, tensors)
    model.tokenizer = tokenizer
    model.freeze_embeddings()
    return model.eval()


def read_weights(checkpoint: str | Path) -> Weights:
    """Read the tensors of a checkpoint. Code inside a pickle is never run."""
    place, weights = Path(checkpoint), {}
    files = [place] if place.is_file() else find_weight_files(place, ("model.safetensors", "pytorch_model.bin"))
    if not files:
        raise CheckpointError(
            f"there is no checkpoint at {str(place)!r}.",
            "give a weight file, or a folder with pytorch_model.bin or model.safetensors.",
        )
    for file in files:
        part = _read_file(file)
        if not isinstance(part, dict) or not all(isinstance(value, Tensor) for value in part.values()):
            raise CheckpointError(
                f"{str(file)!r} holds no state dict.", "save one with torch.save(model.state_dict(), file)."
            )
        weights |= part
    return weights


def _read_file(file: Path) -> Any:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        with warnings.catch_warnings(action="ignore"):  # torch warns of foreign pickles, which raise an error below
            return torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise CheckpointError(
            f"{str(file)!r} is not a plain pickle of tensors: opening it could run code, so it was not opened.",
            "save its state dict alone with torch.save(model.state_dict(), file).",
        ) from error
    except Exception as error:  # for a file of another format, torch's unpickler raises errors of many types
        reason = first_line(error)
        raise CheckpointError(
            f"{str(file)!r} is damaged or of another format: {reason}", "copy or download it again."
        ) from error


def _unwrap(weights: Weights) -> Weights:
    """Remove the prefixes that parallel training and distillation put before the names of tensors."""
    for prefix in ("module.", "student_model."):
        inner = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        weights = inner or weights
    return weights


def _read_head(weights: Weights) -> tuple[Literal["q", "v"], Weights]:
    """Tell from the names of the tensors which kind of reward model they belong to, and read its head."""
    if any(key.startswith(("head.w1.", "head.w2.")) for key in weights):
        raise CheckpointError(
            "the checkpoint has the mlp head of rad-q, which lacks a non-linearity and so is not the mlp head of radq.",
            "convert a checkpoint with a linear head, or train one with --head mlp.",
        )
    projection = weights.get("head.lm_projection.weight")  # (a · d, d): the W_aᵀ, one below the other
    if projection is None:
        try:
            return "v", {f"head.{name}": weights[f"model.lm_head.{name}"] for name in ("weight", "bias")}
        except KeyError:
            raise CheckpointError(
                f"the checkpoint's layout is unknown; it begins with {', '.join(sorted(weights)[:3]) or 'no tensor'}.",
                "radq reads RAD (model.lm_head.weight and .bias) and rad-q (head.lm_projection.weight).",
            ) from None
    d = projection.shape[1]
    if projection.shape[0] % d:
        raise CheckpointError(
            f"head.lm_projection.weight must have shape (attributes · d, d), got {tuple(projection.shape)}.",
            "convert a checkpoint of the public rad-q code.",
        )
    head = {"head.weight": projection.view(-1, d, d).transpose(1, 2).contiguous()}
    if "head.prefix_baseline.weight" in weights:
        head["head.baseline_weight"] = weights["head.prefix_baseline.weight"]
    return "q", head


def _read_backbone(weights: Weights, config: PreTrainedConfig) -> Weights:
    """Rename the backbone's tensors, for example `model.transformer.h.0…` (GPT-2) to `backbone.h.0…`."""
    lm_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    prefix = f"model.{lm_class.base_model_prefix}."
    return {
        f"backbone.{key.removeprefix(prefix)}": value
        for key, value in weights.items()
        if key.startswith(prefix) and not CONSTANTS.search(key)
    }


def _is_tied(weights: Weights, config: PreTrainedConfig) -> bool:
    """Whether input and output embeddings of the checkpoint are equal, whatever the backbone's configuration says."""
    output = weights.get("model.lm_head.weight")  # safetensors files do not hold it if it is tied
    with torch.device("meta"):
        skeleton = AutoModel.from_config(config)
    name = next(name for name, module in skeleton.named_modules() if module is skeleton.get_input_embeddings())
    inputs = _read_backbone(weights, config).get(f"backbone.{name}.weight")
    return output is None or (inputs is not None and torch.equal(inputs, output))


def _load(model: RewardModel, weights: Weights) -> None:
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise CheckpointError(f"the checkpoint does not fit the backbone: {reason}", BACKBONE_HINT) from error
    for key in [*missing, *unexpected]:
        what = "lacks" if key in missing else "has, beyond the backbone's,"
        raise CheckpointError(f"the checkpoint {what} the tensor {key!r}.", BACKBONE_HINT)


def _name_attributes(attributes: Sequence[str] | None, count: int) -> list[str]:
    numbered = ["reward"] if count == 1 else [f"reward_{number}" for number in range(1, count + 1)]
    default = JIGSAW if count == len(JIGSAW) else numbered
    names = list(default if attributes is None else attributes)
    if len(names) != count or len(set(names)) != count:
        raise OptionError(
            f"attributes must be {count} different names, one per output, got {names!r}.", f"give {count} names."
        )
    return names


# --- token classifiers ---


def save_token_classifier(model: RewardModel, folder: str | Path) -> None:
    """Write a RAD-V into a new or empty folder as a token classifier, with its tokenizer."""
    require_own_folder(folder, lambda _: False, "an empty folder")
    if not isinstance(model, RadV):
        raise ModelError(
            f"a {type(model).__name__} gives no rewards from hidden states of single tokens.", "export a RAD-V."
        )
    if model.readout is not None:
        raise ModelError("transformers has no token classifier with a readout.", "export a RAD-V without --reads base.")
    with atomic_folder(folder, replaces=MODEL_FILES) as temporary, quiet():
        make_token_classifier(model).save_pretrained(temporary)
        if model.tokenizer is not None:
            make_tokenizer(model, model.tokenizer).save_pretrained(temporary)


def make_token_classifier(model: RadV) -> Any:
    """Make a token classifier with copies of the weights of a RAD-V, in which adapters are folded."""
    config: Any = copy.deepcopy(model.config.backbone)
    attributes = model.config.attributes
    config.id2label = dict(enumerate(attributes))
    config.label2id = {name: number for number, name in enumerate(attributes)}
    config.problem_type = PROBLEMS[model.config.loss]
    try:
        with no_init_weights():
            classifier = AutoModelForTokenClassification.from_config(config, dtype=model.dtype)
    except ValueError as error:
        raise ModelError(
            f"transformers has no token classifier over {config.model_type!r}.", "train over another backbone."
        ) from error
    head_name = next((name for name in CLASSIFIER_HEADS if hasattr(classifier, name)), "")
    head = getattr(classifier, head_name, None)
    if not isinstance(head, nn.Linear):
        raise ModelError(f"the head of {type(classifier).__name__} is not known.", "train over another backbone.")
    with_bias = nn.Linear(head.in_features, head.out_features, dtype=model.head.weight.dtype)
    with_bias.load_state_dict(model.head.state_dict())
    setattr(classifier, head_name, with_bias.to(model.dtype))
    getattr(classifier, classifier.base_model_prefix).load_state_dict(merged_weights(model.backbone))
    return classifier.to(model.device).eval()


def make_tokenizer(model: RewardModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Make a tokenizer that writes the BOS of the reward model before every text."""
    bos = model.config.bos_token_id
    if not model.config.prepend_bos or bos is None or writes_bos(tokenizer, bos):
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    backend: Any = getattr(changed, "backend_tokenizer", None)
    token = changed.convert_ids_to_tokens(bos)
    if backend is None or not isinstance(token, str):
        raise ModelError("the tokenizer cannot be made to write a BOS.", "train over a model with a fast tokenizer.")
    template = TemplateProcessing(single=f"{token} $A", special_tokens=[(token, bos)])
    before = backend.post_processor
    backend.post_processor = template if before is None else SequenceProcessor([before, template])
    return changed
