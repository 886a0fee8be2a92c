"""Says before training how many rows teach nothing, because the loss uses none of their labels."""

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from trl import SFTConfig

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training.rows import Rows


def check_labels(kind: str, given: Rows, prepared: Rows, args: SFTConfig) -> None:
    """Refuse rows of which none teaches anything, or print how many teach nothing.

    Of a stream, the first 100 rows are read. Not a collective: every rank gets the same result.

    Args:
        kind: what the rows are for.
        given: the rows that were passed to SFTTrainer.
        prepared: the rows that it has tokenized, masked, truncated and packed. If it does not pack
            them, it has dropped those without labels.
        args: SFTTrainer's arguments.
    """
    number = num_taught(prepared.take(100) if isinstance(prepared, IterableDataset) else prepared)
    reason = (
        "no token counts for the loss. They are empty, have no label but -100 or other columns "
        f"than TRL expects, or max_length: {args.max_length} cuts these tokens off."
    )
    if not number:
        raise RecipeError(f"the {kind} rows teach nothing: {reason}")
    # Other strategies of packing split rows.
    if isinstance(given, Dataset) and number < len(given) and args.packing_strategy == "bfd":
        distributed.print_main(
            f"note: {len(given) - number} of {len(given)} {kind} rows teach nothing: {reason}"
        )


def num_taught(rows: Rows) -> int:
    """Return the number of rows that have a label which the loss uses.

    The loss never uses a row's first label, because no token comes before it. Each of the rows
    that are packed into one counts.
    """
    number = 0
    for batch in rows.with_format("arrow").iter(1000):
        labels = batch["labels"]
        lengths = pc.list_value_length(labels)
        if "seq_lengths" in batch.column_names:
            lengths = pc.list_flatten(batch["seq_lengths"])
        starts = np.cumsum(lengths) - lengths
        # An empty row at the end starts after the last label.
        is_used = np.append(pc.list_flatten(labels).to_numpy() != -100, False)
        is_used[starts] = False
        number += np.logical_or.reduceat(is_used, starts).sum()
    return number
