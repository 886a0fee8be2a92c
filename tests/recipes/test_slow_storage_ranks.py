"""A run survives one rank that downloads, reads or writes for longer than the timeout of collectives."""

import json
import time

import pytest

from tests.ranks.harness import FSDP2, fsdp_environment, run_ranks

TIMEOUT_SECONDS = 5


def run_slowly(argv, seconds):
    """Run a recipe to its export; one rank's first call of each slowed function takes `seconds` longer.

    Returns the names of the functions that were slow on this rank.
    """
    from hf_fsdp_recipes.patches import cpu_ranks

    cpu_ranks.enable()
    import hf_fsdp_recipes.loading.load_model as load_model
    from hf_fsdp_recipes import distributed
    from hf_fsdp_recipes.checkpointing import dcp_writer, layout
    from hf_fsdp_recipes.export.tensor_files import FileWriter
    from hf_fsdp_recipes.training.arguments import parse_arguments
    from hf_fsdp_recipes.training.build import build_trainer, find_resume, finish, train
    from hf_fsdp_recipes.training.data.row_tokenizer import RowTokenizer

    slowed = []

    def slow_down(owner, name, slow_rank):
        upstream = getattr(owner, name)

        def slow(*args, **kwargs):
            if distributed.rank() == slow_rank and name not in slowed:
                slowed.append(name)
                time.sleep(seconds)
            return upstream(*args, **kwargs)

        setattr(owner, name, slow)

    slow_down(layout, "checksum", 1)  # the verification of the checkpoint
    slow_down(load_model, "resolve_directory", 0)  # the download of the model
    slow_down(RowTokenizer, "__call__", 0)
    slow_down(dcp_writer.DirectWriter, "write_data", 1)
    slow_down(FileWriter, "close", 1)  # a write of the export
    arguments = parse_arguments(argv)
    checkpoint = find_resume(arguments)
    trainer = build_trainer(arguments)
    assert train(trainer, checkpoint) is None
    finish(trainer, arguments)
    return sorted(slowed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slow_work_on_one_rank_outlasts_the_timeout_of_collectives(tiny_model, text_file, tmp_path):
    rows = tmp_path / "rows.jsonl"  # rows that no earlier test has tokenized
    rows.write_text(text_file.read_text() + json.dumps({"text": f"rows in {tmp_path}"}) + "\n")
    settings = {
        "model_name_or_path": tiny_model("llama"), "dataset_name": rows, "output_dir": tmp_path / "run",
        "max_steps": 2, "save_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 1, "max_length": 64,
        "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True, "report": False,
        "ddp_timeout": TIMEOUT_SECONDS, "resume_from_checkpoint": "auto",
    }  # fmt: skip
    environment = fsdp_environment(FSDP2) | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}

    def run(**changes):
        argv = [part for key, value in (settings | changes).items() for part in (f"--{key}", str(value))]
        return run_ranks(run_slowly, 2, argv, 4 * TIMEOUT_SECONDS, environment=environment, timeout_seconds=300)

    assert run() == [["__call__", "resolve_directory"], ["checksum", "close", "write_data"]]
    assert run(max_steps=3)[1] == ["checksum", "close", "write_data"]
    assert (tmp_path / "run" / "checkpoint-3" / "manifest.json").is_file()
