"""Both kinds of reward models: RAD-Q, which is fast, and RAD-V, which is flexible.

    model = RadQ.from_backbone("gpt2", attributes=["toxicity"])

Axes: b batch, t time, p positions, k candidates, d hidden, a attributes, v vocabulary.
"""

import copy
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from radq.errors import OptionError
from radq.models.config import RewardModelConfig
from radq.models.heads import MlpHead, ValueHead, build_head, score_candidates, score_tokens
from radq.models.kv_cache import takes_siblings
from radq.models.loading import hidden_size, load_output_embedding
from radq.models.reading import Reading
from radq.models.reward import RewardModel, RewardOutput, Scored
from radq.numerics import Candidates, PlacedCandidates, Positions, Texts, pack_left

SIBLINGS_PER_FORWARD = 256  # more candidates than this are read in several forwards


@final
class RadV(RewardModel):
    """RAD-V computes r̂(v | x) from the hidden state of the token v, read after the prefix x.

    It is more flexible than RAD-Q, and needs a forward over every candidate. With a readout it gives values of texts
    without a transformer of its own, for best of n, for scoring and as a teacher; as a guide it runs the language model
    over every candidate.
    """

    kind = "v"

    def __init__(self, config: RewardModelConfig):
        super().__init__(config)
        self.head = ValueHead(hidden_size(config.backbone), len(config.attributes))
        self.post_init()

    def forward(
        self, input_ids: Texts, attention_mask: Texts | None = None, states: Float[Tensor, "b m nd"] | None = None
    ) -> RewardOutput:
        """Head outputs for every token of a text; those of a readout maybe from its `base_states`."""
        if states is None:
            hidden, packed = self._read_texts(input_ids, attention_mask)
        else:
            packed = pack_left(input_ids, torch.ones_like(input_ids) if attention_mask is None else attention_mask)
            hidden = F.pad(self.read_hidden(states), (0, 0, 0, input_ids.shape[1] - states.shape[1]))
        return RewardOutput(packed.unpack(self.head(hidden))[:, hidden.shape[1] - input_ids.shape[1] :])

    @property
    def reads_once(self) -> bool:
        return takes_siblings(self.backbone)

    @torch.no_grad()
    def place_rewards(
        self, input_ids: Texts, attention_mask: Texts, positions: Positions, candidates: PlacedCandidates
    ) -> Float[Tensor, "b p k a"]:
        reading = self.read(input_ids, attention_mask)
        before = reading.prefix.attention_mask.sum(1) - attention_mask.sum(1)  # a BOS that was put before a text
        places, size = positions + before[:, None], max(1, SIBLINGS_PER_FORWARD // candidates.shape[2])
        parts = zip(places.split(size, dim=1), candidates.split(size, dim=1), strict=True)
        hidden = torch.cat([self.read_hidden(reading.read_places(*part)) for part in parts], dim=1)
        return self.link(self.head(hidden))

    def _score(self, reading: Reading, candidates: Candidates | None, known: Bool[Tensor, "#b k"] | None) -> Scored:
        if candidates is None:
            b = len(reading.last)
            candidates = torch.arange(self.vocabulary.size, device=reading.last.device).expand(b, -1)
        prefix = self.head(self.read_hidden(reading.last))[:, None]  # (b, 1, a)
        if candidates.shape[1] <= SIBLINGS_PER_FORWARD:
            outputs, reading = self._score_siblings(reading, candidates)
        else:
            # Keys and values of the whole vocabulary would fill gigabytes: they are dropped chunk by chunk, and the
            # token chosen in the end is read once more.
            chunks = candidates.split(SIBLINGS_PER_FORWARD, dim=1)
            outputs = torch.cat([self._score_siblings(reading, chunk)[0] for chunk in chunks], dim=1)
            reading = reading.drop_siblings()
        return outputs if known is None else torch.where(known[..., None], outputs, prefix), reading

    def _score_siblings(self, reading: Reading, candidates: Candidates) -> Scored:
        reading = reading.read_siblings(candidates)
        assert reading.siblings is not None
        return self.head(self.read_hidden(reading.siblings.hidden)), reading


@final
class RadQ(RewardModel):
    """RAD-Q computes r̂(v | x) from the hidden state of the prefix x and the output embedding of the token v.

    One forward over the prefix gives the rewards of all candidates.
    """

    kind = "q"

    def __init__(self, config: RewardModelConfig):
        super().__init__(config)
        if not config.prepend_bos and not config.readout:
            raise OptionError(
                "prepend_bos must be True for RAD-Q, got False.", "its first token needs a prefix, a BOS."
            )
        d, v = hidden_size(config.backbone), config.backbone.vocab_size
        self.output_embedding = None if config.backbone.tie_word_embeddings else nn.Embedding(v, d)
        self.head = build_head(config.head, d, len(config.attributes), v)
        self.post_init()

    @classmethod
    def from_teacher(cls, teacher: RadV, head: str = "linear") -> "RadQ":
        """Make a student from a copy of the teacher's backbone; its baseline begins as the teacher's head.

        Where the teacher has adapters, the student has a copy of them, and only they and the head are trained.
        """
        backbone, origin = teacher.config.backbone, teacher.config.origin
        if teacher.readout is not None:
            raise OptionError(
                "the teacher is a readout, and has no transformer that a student could begin with.",
                f"name the --backbone of the student: --backbone {origin.name} --reads base makes it a readout, too.",
            )
        if backbone is None or not (backbone.tie_word_embeddings or origin.name):
            raise OptionError("the teacher keeps no output embedding.", "name the backbone it was made from.")
        kept = ("attributes", "backbone", "response_range", "label_scales", "bos_token_id", "vocabulary", "lora_rank")
        with no_init_weights():
            student = cls(
                RewardModelConfig(kind=cls.kind, head=head, **{name: getattr(teacher.config, name) for name in kept})
            )
        student.backbone = copy.deepcopy(teacher.backbone)
        student.init_head(student.embedding if backbone.tie_word_embeddings else load_output_embedding(origin.name))
        if student.head.has_baseline:
            student.head.baseline_weight.data.copy_(teacher.head.weight.data)
        student.tokenizer = teacher.tokenizer
        student.config.set_origin(origin)
        student.freeze_embeddings()
        return student.to(teacher.dtype).eval()  # pyright: ignore[reportArgumentType]

    def init_head(self, output_embedding: Float[Tensor, "v d"]) -> None:
        super().init_head(output_embedding)
        if self.output_embedding is not None:
            self.output_embedding.weight.data = output_embedding.data

    def freeze_embeddings(self) -> None:
        super().freeze_embeddings()
        self.embedding.requires_grad_(False)

    def notice_changes(self) -> None:
        super().notice_changes()
        if isinstance(self.head, MlpHead):
            self.head.notice_changes(self.embedding)

    @property
    def embedding(self) -> Float[Tensor, "v d"]:
        """The frozen output embedding E, gathered where FSDP has split the input embedding among processes."""
        if self.output_embedding is None:
            weight = self.backbone.get_input_embeddings().weight
            return weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        return self.output_embedding.weight

    def forward(
        self,
        input_ids: Texts,
        attention_mask: Texts | None = None,
        random_tokens: Texts | None = None,
        positions: Positions | None = None,
        candidates: PlacedCandidates | None = None,
        states: Float[Tensor, "b t nd"] | None = None,
    ) -> RewardOutput:
        """Head outputs for every token of a text and, for the regulariser, marginals of a random token in its place.

        If there are `candidates`, also their outputs in place of the tokens at `positions`; those below 0 are unused.
        A readout may compute with `states`, its `base_states`, in place of a forward of its base model.
        """
        hidden, packed = self._read_texts(input_ids, attention_mask, states)
        features = self.head.features(hidden[:, :-1], self.embedding)  # (b, t, a, d): each position scores the next
        table = self.head.table(self.embedding)

        def marginals(tokens: Tensor) -> Tensor:
            return score_tokens(features, table, packed.pack(F.pad(tokens, (1, 0)))[:, 1:])

        def restore(values: Tensor) -> Tensor:
            first = torch.zeros_like(values[:, :1])  # nothing precedes the BOS
            return packed.unpack(torch.cat([first, values], dim=1))[:, 1:]

        rewards = restore(marginals(input_ids) + self.head.baseline(hidden[:, :-1]))
        compared = None
        if positions is not None and candidates is not None:
            places = positions[..., None].expand(-1, -1, hidden.shape[-1])
            states_there = packed.unpack(hidden).gather(1, places)
            rows = F.embedding(candidates.clamp(min=0), table).to(features.dtype)
            compared = torch.einsum("bpkd,bpad->bpka", rows, self.head.features(states_there, self.embedding))
            compared = compared + self.head.baseline(states_there)[:, :, None]
        return RewardOutput(rewards, None if random_tokens is None else restore(marginals(random_tokens)), compared)

    def _score(self, reading: Reading, candidates: Candidates | None, known: Bool[Tensor, "#b k"] | None) -> Scored:
        hidden = self.read_hidden(reading.last)
        features = self.head.features(hidden, self.embedding)  # (b, a, d)
        read = candidates if candidates is None or known is None else candidates * known
        marginals = score_candidates(features, self.head.table(self.embedding), read)
        marginals = marginals if known is None else marginals * known[..., None]
        return marginals + self.head.baseline(hidden)[:, None], reading
