"""The rounds of a distillation on candidates.

In later rounds the base model, guided by the student, writes more prefixes. A round begins at a certain step. A run
that is resumed loads the candidates of the rounds that it had begun.
"""

import math
import warnings
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from radq.errors import OptionError
from radq.guides import Guide, RewardGuide
from radq.numerics import empty_cache
from radq.training.candidates import HELD_OUT, CandidateFeed, CandidateMaker, CandidateSet
from radq.training.reward_trainer import RewardTrainer
from radq.training.run import first_process_first


class RoundsCallback(TrainerCallback):
    """Gives a trainer its candidates, and more of them at the beginning of each round."""

    def __init__(self, trainer: RewardTrainer, maker: CandidateMaker):
        if trainer.is_fsdp_enabled and trainer.config.rounds > 1:
            raise OptionError("rounds must be 1 with FSDP.", "leave --rounds out, or train without FSDP.")
        self.trainer, self.maker = trainer, maker
        maker.lm.to(trainer.args.device)
        self.sets: list[CandidateSet] = []
        with first_process_first(), torch.random.fork_rng():
            trainer.held_out = maker.make(HELD_OUT)
        self._begin_round()

    @property
    def candidates(self) -> CandidateSet:
        """The candidates of all rounds so far."""
        return CandidateSet.join(self.sets)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        while self._is_due(state):
            if not self.maker.is_made(len(self.sets) + 1):
                warnings.warn(
                    f"the candidates of round {len(self.sets) + 1} are missing: the student writes them anew, and the "
                    "run will not end as it would have.",
                    stacklevel=2,
                )
            self._begin_round()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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
