"""The rows of a run, ready for SFTTrainer, wherever they come from: prepared before, prepared now, or a stream."""

from typing import Any

from hf_fsdp_recipes import ranks
from hf_fsdp_recipes.train import prepared
from hf_fsdp_recipes.train.arguments import is_streaming
from hf_fsdp_recipes.train.preparation import TrainingRows, prepare, print_tallies
from hf_fsdp_recipes.train.tokens import tokenizer_for_rows


def load_rows(arguments: Any, tokenizer: Any) -> TrainingRows:
    """Load what a run trains and evaluates on, and tell SFTTrainer that nothing is left to prepare.

    Collective: every rank must call this. Rank 0 prepares, the others find its cache; however long it takes, no
    collective's time-out runs meanwhile. Says what was dropped and cut.

    Raises:
        DataError: the same on every rank.
    """
    training = arguments.training
    if not arguments.mixture.datasets and prepared.is_prepared(arguments.script.dataset_name):
        rows = ranks.in_turns(lambda: prepared.read(arguments, tokenizer))
    elif is_streaming(arguments):
        from hf_fsdp_recipes.train.streaming import open_streams

        rows = ranks.in_turns(lambda: open_streams(arguments, tokenizer_for_rows(tokenizer, training)))
    else:
        rows = ranks.in_turns(lambda: prepare(arguments, tokenizer_for_rows(tokenizer, training)))
    print_tallies(rows.tallies, training.max_length)
    training.dataset_kwargs = (training.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
    training.assistant_only_loss = False  # the labels say it; SFTTrainer would ask for messages
    return rows
