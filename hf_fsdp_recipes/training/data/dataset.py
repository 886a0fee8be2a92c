"""Loads the rows of a run for SFTTrainer: from a prepared directory, prepared now, or streamed."""

from transformers import PreTrainedTokenizerBase

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.training.arguments import Arguments, is_streaming
from hf_fsdp_recipes.training.data import cache
from hf_fsdp_recipes.training.data.filtering import print_counts
from hf_fsdp_recipes.training.data.preparation import TrainingRows, prepare
from hf_fsdp_recipes.training.data.streaming import open_streams
from hf_fsdp_recipes.training.tokenizer import tokenizer_for_rows


def load_rows(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> TrainingRows:
    """Load the rows a run trains and evaluates on, and set SFTTrainer's arguments so that it prepares nothing.

    Collective: every rank must call this. Rank 0 prepares the rows and the others read its cache, waiting without a
    timeout. Rank 0 prints how many rows were dropped and truncated.

    Raises:
        DataError: the same on every rank.
    """
    training = arguments.training

    def load() -> TrainingRows:
        if cache.is_cache(arguments.script.dataset_name) and not arguments.mixture.datasets:
            return cache.read_cache(arguments, tokenizer)
        for_rows = tokenizer_for_rows(tokenizer, training)
        return open_streams(arguments, for_rows) if is_streaming(arguments) else prepare(arguments, for_rows)

    rows = distributed.main_first(load)
    print_counts(rows.counts, training.max_length)
    training.dataset_kwargs = (training.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
    training.assistant_only_loss = False  # already in the labels; SFTTrainer would ask for messages
    return rows
