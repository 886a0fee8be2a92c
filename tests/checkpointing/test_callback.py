"""What the callback logs, tested without ranks."""

from types import SimpleNamespace

from transformers import TrainerControl, TrainerState

from hf_fsdp_recipes import ShardedCheckpointCallback
from hf_fsdp_recipes.checkpointing.save_schedule import SaveSchedule
from hf_fsdp_recipes.errors import CheckpointError


def test_failed_save_is_reported_once_however_many_steps_follow(caplog):
    callback = ShardedCheckpointCallback(signals=False)
    for text in ("step 2 was not written", "step 4 was not written"):
        callback._schedule = SaveSchedule(SimpleNamespace(save_strategy="steps"), last_saved_step=0)
        callback._writer = SimpleNamespace(failure=CheckpointError(text), completed=None)
        for step in range(3):
            callback.on_step_end(None, TrainerState(global_step=step), TrainerControl())
        assert caplog.text.count(text) == 1
