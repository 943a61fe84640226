"""RAD-V as a token classifier of transformers, for programs that score texts and do not know radq.

    save_token_classifier(RewardModel.from_pretrained("reward"), "classifier")
    AutoModelForTokenClassification.from_pretrained("classifier")

The logits at a token are the outputs of the reward model's head there. The tokenizer writes the BOS with which the
reward model begins every text, so the first logits of a text are those of the BOS and mean nothing.
"""

import copy
from pathlib import Path
from typing import Any

from tokenizers.processors import Sequence, TemplateProcessing
from torch import nn
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from radq.errors import ModelError
from radq.files import MODEL_FILES, atomic_folder, require_own_folder
from radq.models.lora import merged_weights
from radq.models.rad_v import RadV
from radq.models.reward import RewardModel
from radq.models.vocabulary import writes_bos
from radq.sources.hub import quiet

HEADS = ("score", "classifier")  # names of the last layer of transformers' token classifiers
# What programs such as vLLM do to the logits, so that their scores are rewards: nothing, or σ.
PROBLEMS = {"mse": "regression", "ce": "multi_label_classification"}


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
    head = next((getattr(classifier, name) for name in HEADS if hasattr(classifier, name)), None)
    if not isinstance(head, nn.Linear):
        raise ModelError(f"the head of {type(classifier).__name__} is not known.", "train over another backbone.")
    with_bias = nn.Linear(head.in_features, head.out_features, dtype=model.head.weight.dtype)
    with_bias.load_state_dict(model.head.state_dict())
    setattr(classifier, next(name for name in HEADS if hasattr(classifier, name)), with_bias.to(model.dtype))
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
    backend.post_processor = template if before is None else Sequence([before, template])
    return changed
