"""Rows reach SFTTrainer in TRL's formats.

They come from files, folders and the formats of the five documents.
"""

import json
from types import SimpleNamespace

import pytest
from datasets import Dataset

from hf_fsdp_recipes.errors import RecipeError
from hf_fsdp_recipes.training.arguments import RecipeArguments
from hf_fsdp_recipes.training.rows import read_rows, to_trl_format

ROW = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
PREFACE = "Below is an instruction that describes a task"


def _arguments(name, split="train", streamed=False, num_ranks=1, **recipe):
    script = {
        "dataset_name": str(name),
        "dataset_config": "of another dataset",
        "dataset_streaming": streamed,
    }
    return SimpleNamespace(
        script=SimpleNamespace(**script, dataset_train_split=split, dataset_test_split="test"),
        mixture=SimpleNamespace(datasets=None),
        training=SimpleNamespace(seed=0, world_size=num_ranks, dataset_text_field="text"),
        recipe=RecipeArguments(**recipe),
        is_streamed=streamed,
    )


@pytest.mark.parametrize(
    ("prompt_format", "row", "prompt", "completion"),
    [
        (
            "alpaca",
            ROW,
            f"{PREFACE}, paired with an input that provides further context. Write a response that "
            "appropriately completes the request.\n\n"
            "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n",
            "3",
        ),
        (
            "alpaca",
            ROW | {"input": ""},
            f"{PREFACE}. Write a response that appropriately completes the request.\n\n"
            "### Instruction:\nAdd.\n\n### Response:\n",
            "3",
        ),
        (
            "chat",
            ROW,
            [{"role": "user", "content": "Add.\n\n1 and 2"}],
            [{"role": "assistant", "content": "3"}],
        ),
    ],
)
def test_instruction_rows_become_prompt_and_completion(prompt_format, row, prompt, completion):
    assert to_trl_format(Dataset.from_list([row]), prompt_format)[0] == {
        "prompt": prompt,
        "completion": completion,
    }


@pytest.mark.parametrize(
    "row", [{"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"content": "a"}]
)
def test_other_rows_are_left_to_trl(row):
    assert to_trl_format(Dataset.from_list([row]), "alpaca")[0] == row


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt", "folder", "rows.parquet", "rows.csv"])
def test_a_file_or_folder_is_a_dataset(name, tmp_path):
    path = tmp_path / name
    rows = Dataset.from_list([{"text": "one"}, {"text": "two"}])
    if name == "folder":
        path.mkdir()
        rows.to_json(path / "train.jsonl")
        rows.to_json(path / "test.jsonl")
    elif name == "rows.txt":
        path.write_text("one\ntwo\n")
    else:
        getattr(rows, f"to_{path.suffix[1:].replace('jsonl', 'json')}")(path)
    train, evaluation = read_rows(_arguments(path))
    assert train["text"][:] == ["one", "two"]
    assert (evaluation is None) == (name != "folder")


def test_rows_are_held_out_if_there_is_no_test_split(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(20)))
    train, evaluation = read_rows(_arguments(file, validation_split_percentage=20))
    assert (len(train), len(evaluation)) == (16, 4)
    assert sorted(int(text) for text in [*train["text"], *evaluation["text"]]) == list(range(20))


@pytest.mark.parametrize(
    ("content", "changes", "says"),
    [
        (None, {}, "there is no such file or folder"),
        ("{", {}, "cannot be read"),
        ('{"q": "a"}\n', {}, "has the columns q. One of messages, .*text is needed"),
        ("", {}, "cannot be read|0 rows"),
        ('{"text": "a"}\n', {"num_ranks": 2}, "1 rows for 2 ranks"),
        ('{"text": "a"}\n', {"split": "validation"}, None),
    ],
)
def test_rows_that_cannot_be_read_are_one_sentence(content, changes, says, tmp_path):
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    if says is None:  # a file has the split that is asked for
        assert len(read_rows(_arguments(file, **changes))[0]) == 1
        return
    with pytest.raises(RecipeError, match=says) as error:
        read_rows(_arguments(file, **changes))
    assert str(file) in str(error.value) and "\n" not in str(error.value)
