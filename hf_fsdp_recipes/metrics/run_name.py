"""Default names of runs: date, model, nodes, GPUs per node, epochs, batch size.

Source: the log files of AMD's article on FSDP with ROCm, fsdp_training_DATE_modelVersion_#node_#gpuPerNode_#epoch_#batchSize.
"""

import os
from datetime import datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainingArguments


def default_run_name(training: "TrainingArguments", model: str, date: datetime | None = None) -> str:
    """Return the default name of a run, with node and GPU counts from the launcher's environment.

    Args:
        training: arguments with the number of steps or epochs, and the batch size per GPU.
        model: Hub id or directory; its last part is used.
        date: start of the run; default: now.
    """
    gpus_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_nodes = max(1, int(os.environ.get("WORLD_SIZE", "1")) // gpus_per_node)
    length = f"{training.max_steps}steps" if training.max_steps > 0 else f"{training.num_train_epochs:g}"
    return (
        f"fsdp_training_{date or datetime.now():%Y%m%d-%H%M}_{PurePosixPath(model).name}_{num_nodes}_{gpus_per_node}"
        f"_{length}_{training.per_device_train_batch_size}"
    )
