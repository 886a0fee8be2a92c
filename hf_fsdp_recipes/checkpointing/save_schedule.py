"""Decides at which steps a run saves, based on the flag that Trainer sets to request a save."""

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy


class SaveSchedule:
    """Takes over Trainer's saves for one run: clears Trainer's `should_save` flag and remembers the step to save."""

    def __init__(self, args: TrainingArguments, last_saved_step: int) -> None:
        self.strategy = SaveStrategy(args.save_strategy)
        self.last_saved_step = last_saved_step
        self._due_step: int | None = None
        if self.strategy == SaveStrategy.BEST:
            # With "best", Trainer saves inside evaluation, where a callback cannot intercept the save. With "steps", Trainer
            # still tracks the best step, but requests saves with a flag that a callback can clear.
            args.save_strategy = SaveStrategy.STEPS

    def request(self, state: TrainerState) -> None:
        """Schedule a save of the current step, unless this step is saved already."""
        if state.global_step != self.last_saved_step:
            self._due_step = state.global_step

    def take_flag(self, state: TrainerState, control: TrainerControl, strategy: SaveStrategy) -> None:
        """Clear Trainer's flag. If it was set and the run's save strategy is `strategy`, schedule a save of the current step."""
        if control.should_save and self.strategy == strategy:
            self.request(state)
        control.should_save = False

    def take_due_step(self, state: TrainerState) -> int | None:
        """Return the step to save now and count it as saved, or return None if no save is due."""
        if self.strategy == SaveStrategy.BEST and state.best_global_step == state.global_step:
            self.request(state)
        step, self._due_step = self._due_step, None
        if step is not None:
            self.last_saved_step = step
        return step
