"""The trainer of reward models. `radq.training.reward` runs it, and `radq.training.losses` says what is learnt.

The random tokens of the regulariser depend on row, position and epoch alone, so that micro-batches and the number of
processes do not change them.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState

from radq.data.dataset import RewardData
from radq.errors import OptionError
from radq.guides.base import Guide
from radq.guides.reward import RewardGuide
from radq.models.config import simplify_ranges
from radq.models.loading import evaluating
from radq.models.reward import RewardModel
from radq.numerics import empty_cache
from radq.training.candidate_agreement import UNUSED, compare_rewards, metrics_of
from radq.training.candidates import HELD_OUT, CandidateFeed, CandidateMaker, CandidateSet
from radq.training.config import RewardTrainingConfig
from radq.training.losses import candidate_loss, choose_objective, difference_loss
from radq.training.run import first_process_first
from radq.training.teacher import Teacher
from radq.training.trainer import BatchTrainer

RANGE_PAIRS = 250  # pairs whose rewards decide about the range, at most
RANGE_QUANTILES = (0.01, 0.99)


class RewardTrainer(BatchTrainer):
    """transformers' Trainer for reward models, on labels, on pairs, or on the rewards of a teacher."""

    def __init__(
        self,
        model: RewardModel,
        config: RewardTrainingConfig,
        train_dataset: RewardData,
        eval_dataset: RewardData | None = None,
        teacher: RewardModel | Teacher | None = None,
        progress: bool = False,
    ):
        self.config = config
        self.teacher = teacher  # no part of the model, so that it is neither trained nor saved
        self.feed: CandidateFeed | None = None  # of prefixes that are learnt beside the texts
        self.held_out: CandidateSet | None = None  # candidates with which the agreement is measured
        self.objective = choose_objective(config, model.config.attributes, train_dataset)
        super().__init__(model, config, train_dataset, eval_dataset, progress)
        if teacher is not None:
            teacher.requires_grad_(False).eval().to(self.args.device)  # pyright: ignore[reportArgumentType]
            for part in teacher.modules():
                if isinstance(part, RewardModel):
                    part.may_change = False  # so that a captured step need not wait for the answer

    def train_and_evaluate(self, checkpoint: Path | None) -> dict[str, float]:
        metrics = super().train_and_evaluate(checkpoint)
        if self.config.compares:  # labels tell the range of other rewards
            self.reward_model.config.response_range = simplify_ranges(self.measure_range(), 1)
        return metrics

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.config.head_learning_rate is None:
            return optimizer
        model: Any = self.model
        head = {id(parameter) for parameter in model.head.parameters()}
        for group in list(optimizer.param_groups):  # those of the head get their rate, and keep their other settings
            moved = [parameter for parameter in group["params"] if id(parameter) in head]
            if moved:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in head]
                optimizer.add_param_group({**group, "params": moved, "lr": self.config.head_learning_rate})
        return optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a whole model, or adapters, or a readout, and the head, with which transformers' Trainer cannot deal.

        Checkpoints of FSDP always hold whole models.
        """
        if self.reward_model.config.beside_backbone and not self.is_fsdp_enabled:
            self.reward_model.load_trained(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    # --- batches ---

    def collate_for_training(self, batch: Any) -> Any:
        """Add prefixes to the texts of a batch; if steps are captured, to the shape that all batches have."""
        batch = super().collate_for_training(batch)
        if self.feed is None:
            return batch
        num_texts = len(batch["rows"]) if self.captures else None
        return batch | self.feed.batch(batch["rows"].numpy(), self.batches.epoch, num_texts)

    def count_items(self, batch: dict[str, Tensor]) -> Float[Tensor, " n"]:
        counts = self.objective.count_items(batch)
        if "candidates" not in batch:
            return counts
        return torch.cat([counts, (batch["candidates"] >= 0).sum()[None].float()])

    def count_tokens(self, inputs: dict[str, Tensor]) -> int:
        prefixes = inputs.get("prefix_mask")
        return super().count_tokens(inputs) + (0 if prefixes is None else int(prefixes.sum()))

    # --- losses ---

    def find_loss(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], shares: Float[Tensor, " n"]
    ) -> tuple[Tensor, Any]:
        rows, positions, *candidates = shares
        output = model(**read_texts(inputs), **self._random_tokens(inputs))
        loss = self.objective.loss(output.rewards, inputs, rows, positions)
        if output.marginals is not None:
            loss = loss + self.config.reg_weight * self.objective.regulariser(output.marginals, inputs, positions)
        for share in candidates:  # in a forward pass of their own, since prefixes and texts differ in length
            read = self._compare(model, inputs), inputs["candidate_targets"], inputs["candidates"] >= 0
            own = self.config.candidate_weight * candidate_loss(*read)
            loss = loss + (own + self.config.difference_weight * difference_loss(*read)) * share
        return loss, output

    def _compare(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Float[Tensor, "b p k a"]:
        """Compute the student's head outputs for candidates."""
        return model(
            input_ids=inputs["prefix_ids"],
            attention_mask=inputs["prefix_mask"],
            positions=inputs["positions"],
            candidates=inputs["candidates"],
        ).candidates

    def _random_tokens(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make the model's argument with random tokens for the regulariser; no argument if there is no regulariser."""
        if self.config.kind == "v" or self.config.reg_weight == 0 or not self.reward_model.training:
            return {}
        size = self.reward_model.vocabulary.size
        return {"random_tokens": random_tokens(inputs, size, self.config.seed, inputs["epoch"])}

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move a batch to the device, and compute the teacher's rewards if that was not done before training."""
        inputs = super()._prepare_inputs(inputs)
        if not self.config.learns_tokens or "targets" in inputs:
            return inputs
        assert self.teacher is not None
        with torch.no_grad(), self.accelerator.autocast():  # in the precision of the student
            targets = self.teacher.token_rewards(inputs["input_ids"], inputs["attention_mask"]).float()
        return inputs | {"targets": targets}

    # --- evaluation ---

    def read_output(self, output: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.objective.statistics(self.reward_model.link(output.rewards), inputs)

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        metrics = self.objective.metrics(np.asarray(prediction.predictions), np.asarray(prediction.label_ids))
        return metrics | self.measure_candidates()

    def metric_names(self) -> list[str]:
        data: Any = self.eval_dataset
        agreement = ["candidate_correlation", "candidate_error"] if self.config.base else []
        return [*self.objective.metric_names(data), *agreement]

    @torch.no_grad()
    def measure_candidates(self) -> dict[str, float]:
        """Measure the agreement with the teacher about held-out candidates; no metrics if there are none."""
        held_out, model, wrapped = self.held_out, self.reward_model, self.model_wrapped
        if held_out is None or wrapped is None:
            return {}
        rewards = []
        size = self.args.per_device_eval_batch_size
        with evaluating(model), self.compute_loss_context_manager():
            for first in range(0, len(held_out), size):
                batch = held_out.batch(range(first, min(first + size, len(held_out))))
                inputs = {name: values.to(self.args.device) for name, values in batch.items()}
                rewards.append(model.link(self._compare(wrapped, inputs)).double().cpu().numpy())
        n, p, k, a = held_out.targets.shape
        own, wanted = (values.reshape(n * p, k, a) for values in (np.concatenate(rewards), held_out.targets))
        used = held_out.candidates.reshape(n * p, k) != UNUSED
        return metrics_of(compare_rewards(own, wanted, used), model.config.attributes)

    def _evaluate_end(self) -> dict[str, float]:
        """Compute the metrics of the last weights. The agreement is measured also if no texts are held out."""
        metrics = super()._evaluate_end()
        if self.held_out is not None and "eval_candidate_error" not in metrics:
            measured = {f"eval_{name}": value for name, value in self.measure_candidates().items()}
            self.log(dict(measured))
            metrics |= measured
        return metrics

    @property
    def reward_model(self) -> RewardModel:
        """The model that is trained."""
        model: Any = self.model
        return model

    # --- the range of rewards that pairs teach ---

    @torch.no_grad()
    def measure_range(self) -> tuple[float, float]:
        """Quantiles of the rewards of whole texts that were trained on; guides clamp rewards to this range."""
        data: Any = self.train_dataset
        wrapped: Any = self.model_wrapped
        order = np.random.default_rng(self.config.seed).permutation(len(data))[:RANGE_PAIRS]
        order = order[np.argsort(-data.lengths[order], kind="stable")]
        chunks = np.array_split(order, math.ceil(len(order) / self.args.per_device_eval_batch_size))
        rewards = []
        with evaluating(self.reward_model), self.compute_loss_context_manager():
            for chunk in chunks:
                inputs: Any = self._prepare_inputs(data.batch(chunk.tolist()))
                output = wrapped(**read_texts(inputs))
                rewards.append(self.read_output(output, inputs)[0].double().cpu().numpy())
        low, high = np.quantile(np.concatenate(rewards), RANGE_QUANTILES).tolist()
        return low, high


class RoundsCallback(TrainerCallback):
    """Gives a trainer its candidates, and more of them at the beginning of each round, which is a certain step.

    In later rounds the base model, guided by the student, writes more prefixes. A run that is resumed loads the
    candidates of the rounds that it had begun.
    """

    def __init__(self, trainer: RewardTrainer, maker: CandidateMaker):
        if trainer.is_fsdp_enabled and trainer.config.rounds > 1:
            raise OptionError("rounds must be 1 with FSDP.", "leave --rounds out, or train without FSDP.")
        self.trainer, self.maker = trainer, maker
        maker.lm.to(trainer.args.device)
        self.sets: list[CandidateSet] = []
        with first_process_first(), torch.random.fork_rng():
            trainer.held_out = maker.make(HELD_OUT)
        self._begin_round()
        if maker.teacher.ranges is None:
            self._widen_range()

    def _widen_range(self) -> None:
        """Let the student give all rewards of the teacher, whose range was not known before, and the labels."""
        ranges, data = self.candidates.ranges, self.trainer.train_dataset
        if isinstance(data, RewardData) and not self.trainer.config.learns_tokens:
            both = zip(ranges, data.label_limits, strict=True)
            ranges = [(min(lows), max(highs)) for lows, highs in (zip(*pair, strict=True) for pair in both)]
        self.trainer.reward_model.config.response_range = simplify_ranges(ranges, len(ranges))

    @property
    def candidates(self) -> CandidateSet:
        """The candidates of all rounds so far."""
        return CandidateSet.join(self.sets)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        while self._is_due(state):
            if not self.maker.is_made(len(self.sets) + 1):
                warnings.warn(
                    f"the candidates of round {len(self.sets) + 1} are missing: the student writes them anew, and the "
                    "run will not end as it would have.",
                    stacklevel=2,
                )
            self._begin_round()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        while self._is_due(state):
            self._begin_round()

    def _is_due(self, state: TrainerState) -> bool:
        done, rounds = len(self.sets), self.trainer.config.rounds
        first_step = math.ceil(state.max_steps * done / rounds)
        return done < rounds and first_step <= state.global_step < state.max_steps

    def _begin_round(self) -> None:
        """Make the candidates of the next round, or load them.

        The state of the random numbers is put back, so that a run goes on alike whether they were made or loaded.
        """
        config, model = self.trainer.config, self.trainer.reward_model
        number, training = len(self.sets) + 1, model.training
        with first_process_first(), torch.random.fork_rng():
            self.sets.append(self.maker.make(number, None if number == 1 else self._guide))
        empty_cache()  # a teacher reads many candidates at once, and steps or other processes need the memory
        model.train(training)
        if config.candidate_share:
            data: Any = self.trainer.train_dataset
            self.trainer.feed = CandidateFeed(self.candidates, data.rows, config.candidate_share, config.seed)
        if number == config.rounds:
            self.maker.release()

    def _guide(self, beta: float) -> Guide:
        model = self.trainer.reward_model
        return RewardGuide(model, dict.fromkeys(model.config.attributes, beta))


def read_texts(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take from a batch the arguments with which a model reads its texts, with stored states where there are some."""
    return {name: inputs[name] for name in ("input_ids", "attention_mask", "states") if name in inputs}


def random_tokens(
    inputs: dict[str, Tensor], vocab_size: int, seed: int, epoch: int | Int[Tensor, ""]
) -> Int[Tensor, "b t"]:
    """Compute a uniformly random token per position from a hash of text, position, epoch and seed.

    The result is the same on every machine.
    """
    input_ids = inputs["input_ids"]
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    texts = inputs.get("texts", inputs["rows"])  # those of pairs have numbers of their own
    state = texts[:, None] * 0x9E3779B1 + positions * 0x85EBCA77 + (epoch * 0x27D4EB2F + seed * 0x165667B1)
    for factor in (0x2C1B3C6D, 0x297A2D39):  # integer mixing in 32 bits, held in 64
        state = state & 0xFFFFFFFF
        state = ((state ^ (state >> 15)) * factor) & 0xFFFFFFFF
        state = state ^ (state >> 13)
    return state % vocab_size
