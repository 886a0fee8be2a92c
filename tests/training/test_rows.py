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


def _arguments(name, split="train", streamed=False, num_ranks=1, eval_strategy="no", **recipe):
    script = {
        "dataset_name": str(name),
        "dataset_config": "of another dataset",
        "dataset_streaming": streamed,
    }
    return SimpleNamespace(
        script=SimpleNamespace(**script, dataset_train_split=split, dataset_test_split="test"),
        mixture=SimpleNamespace(datasets=None, streaming=False),
        training=SimpleNamespace(
            seed=0, world_size=num_ranks, dataset_text_field="text", eval_strategy=eval_strategy
        ),
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
    train, evaluation = read_rows(_arguments(path, eval_strategy="steps"))
    assert train["text"][:] == ["one", "two"]
    assert (evaluation is None) == (name != "folder")


def test_a_folder_with_configs_is_read_with_the_one_that_is_named(tmp_path):
    config = "- {config_name: %s, data_files: %s.jsonl}\n"
    names = ("one", "two")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n" + "".join(config % (name, name) for name in names) + "---\n"
    )
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    arguments = _arguments(tmp_path)
    with pytest.raises(RecipeError, match="of another dataset"):
        read_rows(arguments)
    arguments.script.dataset_config = "two"
    rows, _ = read_rows(arguments)
    assert rows["text"] == ["two"]


def test_rows_are_held_out_if_there_is_no_test_split(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(20)))
    train, evaluation = read_rows(
        _arguments(file, eval_strategy="steps", validation_split_percentage=20)
    )
    assert (len(train), len(evaluation)) == (16, 4)
    assert sorted(int(text) for text in [*train["text"], *evaluation["text"]]) == list(range(20))


@pytest.mark.parametrize(
    ("content", "changes", "says"),
    [
        (None, {}, "cannot be read: .* (Unable|Couldn't) .*find"),
        ("{", {}, "cannot be read"),
        ('{"q": "a"}\n', {}, "has the columns q. One of these is .*: instruction and output; "),
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


MESSAGE = {"role": "user", "content": "a"}
GOOD = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"role": "assistant", "content": None, "tool_calls": "f()"}


@pytest.mark.parametrize(
    ("good", "bad", "column"),
    [
        ({"text": "a"}, {"text": None}, "text"),
        ({"input_ids": [1, 2]}, {"input_ids": None}, "input_ids"),
        ({"prompt": "a", "completion": "b"}, {"prompt": None, "completion": "b"}, "prompt"),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}, "completion"),
        (ROW, ROW | {"instruction": None}, "instruction"),
        (ROW, ROW | {"output": None}, "output"),
        ({"messages": GOOD}, {"messages": None}, "messages"),
        ({"messages": GOOD}, {"messages": []}, "messages"),
        ({"messages": GOOD}, {"messages": [*GOOD, MESSAGE | {"content": None}]}, "messages"),
        (
            {"conversations": [{"from": "human", "value": "a"}]},
            {"conversations": [{"from": "human", "value": None}]},
            "conversations",
        ),
    ],
)
def test_a_row_without_its_text_is_refused_with_its_number(good, bad, column, tmp_path):
    """Without the check, TRL's error would not name the row, or the text "None" be trained on."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (good, good, bad, good, bad)))
    says = f"rows.jsonl: column {column} lacks its text in 2 rows, first in row 3"
    with pytest.raises(RecipeError, match=says):
        read_rows(_arguments(file))


@pytest.mark.parametrize(
    "row",
    [
        {"text": ""},
        {"input_ids": []},
        ROW | {"input": None},
        {"messages": [*GOOD, CALL]},
        {"messages": GOOD, "text": None},
    ],
)
def test_rows_that_trl_can_train_on_are_not_refused(row, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert len(read_rows(_arguments(file))[0]) == 1


def test_rows_for_evaluation_are_checked_only_if_they_are_used(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "test.jsonl").write_text(json.dumps(ROW | {"output": None}) + "\n")
    assert read_rows(_arguments(tmp_path))[1] is None
    with pytest.raises(RecipeError, match="output lacks its text in 1 rows"):
        read_rows(_arguments(tmp_path, eval_strategy="steps"))
