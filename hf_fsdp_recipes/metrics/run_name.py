"""The name of a run: date, model, nodes, GPUs a node, epochs, batch.

Source: the log files of AMD's article on FSDP with ROCm, fsdp_training_DATE_modelVersion_#node_#gpuPerNode_#epoch_#batchSize.
"""

import os
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any


def run_name(date: datetime, model: str, num_nodes: int, gpus_per_node: int, epochs: float | str, batch: int) -> str:
    """Return the name of a run.

    Args:
        date: when it starts, to the minute.
        model: Hub id or directory; its last part is taken.
        num_nodes: nodes.
        gpus_per_node: ranks on each.
        epochs: passes over the data, or what ends the run instead ("48steps").
        batch: sequences a GPU in one forward pass.
    """
    epochs = epochs if isinstance(epochs, str) else f"{epochs:g}"
    fields = (f"{date:%Y%m%d-%H%M}", PurePosixPath(model).name, num_nodes, gpus_per_node, epochs, batch)
    return "_".join(["fsdp_training", *map(str, fields)])


def default_run_name(training: Any, model: str) -> str:
    """Return the name of a run that starts now with these TrainingArguments. No collective; rank 0's is used."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_nodes = max(1, int(os.environ.get("WORLD_SIZE", "1")) // ranks_here)
    epochs = f"{training.max_steps}steps" if training.max_steps > 0 else training.num_train_epochs
    return run_name(datetime.now(), model, num_nodes, ranks_here, epochs, training.per_device_train_batch_size)
