"""The rows of a run, ready for SFTTrainer, wherever they come from: prepared before, prepared now, or a stream."""

from typing import Any

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.training.arguments import is_streaming
from hf_fsdp_recipes.training.data import cache
from hf_fsdp_recipes.training.data.tokenize import TrainingRows, prepare, print_tallies
from hf_fsdp_recipes.training.tokenizer import tokenizer_for_rows


def load_rows(arguments: Any, tokenizer: Any) -> TrainingRows:
    """Load what a run trains and evaluates on, and tell SFTTrainer that nothing is left to prepare.

    Collective: every rank must call this. Rank 0 prepares, the others find its cache; however long it takes, no
    collective's time-out runs meanwhile. Says what was dropped and cut.

    Raises:
        DataError: the same on every rank.
    """
    training = arguments.training
    if not arguments.mixture.datasets and cache.is_prepared(arguments.script.dataset_name):
        rows = distributed.main_first(lambda: cache.read(arguments, tokenizer))
    elif is_streaming(arguments):
        from hf_fsdp_recipes.training.data.streaming import open_streams

        rows = distributed.main_first(lambda: open_streams(arguments, tokenizer_for_rows(tokenizer, training)))
    else:
        rows = distributed.main_first(lambda: prepare(arguments, tokenizer_for_rows(tokenizer, training)))
    print_tallies(rows.tallies, training.max_length)
    training.dataset_kwargs = (training.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
    training.assistant_only_loss = False  # the labels say it; SFTTrainer would ask for messages
    return rows
