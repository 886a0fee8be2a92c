"""A dataset is recognized by its columns; for unknown ones, a DataError lists the columns."""

import json
from types import SimpleNamespace

import pytest
from trl import DatasetMixtureConfig
from trl.scripts.utils import DatasetConfig

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.data import dataset_parts, row_formats


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(name, **changes):
    settings = {
        "dataset_config": None, "dataset_streaming": False, "dataset_train_split": "train", "dataset_test_split": "test",
        "eval_strategy": "no", "seed": 0, "dataset_text_field": "text", "world_size": 2, "prompt_template": "alpaca",
        "validation_split_percentage": 0.0,
    }  # fmt: skip
    one = SimpleNamespace(dataset_name=str(name), **(settings | changes))
    return SimpleNamespace(script=one, training=one, recipe=one, mixture=DatasetMixtureConfig())


def load(arguments):
    """Return training and evaluation rows as they are before tokenizing."""
    [part] = dataset_parts.load_parts(arguments)
    one = arguments.training
    return row_formats.to_sft_format(
        part.train, part.name, one.dataset_text_field, one.prompt_template
    ), part.evaluation


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, ["messages"]),
        ({"prompt": "a", "completion": "b"}, ["prompt", "completion"]),
        ({"instruction": "a", "input": "", "output": "b"}, ["prompt", "completion"]),
        ({"instruction": "a", "output": "b"}, ["prompt", "completion"]),
        ({"text": "a"}, ["text"]),
        ({"conversations": [{"from": "human", "value": "hi"}], "id": "1"}, ["messages"]),
        ({"conversations": [{"from": "gpt", "value": "hi"}], "tools": "[]", "id": 1}, ["messages", "tools"]),
    ],
)
def test_formats_are_recognized_from_the_columns(tmp_path, row, columns):
    rows, _ = load(arguments(write(tmp_path / "rows.jsonl", [row] * 4)))
    assert sorted(rows.column_names) == sorted(columns)


def test_alpaca_prompt_with_and_without_input():
    with_input = row_formats.alpaca_prompt({"instruction": "Add", "input": "1 and 2"})
    assert "### Instruction:\nAdd\n\n### Input:\n1 and 2\n\n### Response:\n" in with_input
    assert "Input" not in row_formats.alpaca_prompt({"instruction": "Add", "input": ""})


def test_alpaca_rows_can_become_conversations(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"instruction": "Add", "input": "1 and 2", "output": "3"}] * 2)
    rows, _ = load(arguments(file, prompt_template="chat"))
    assert [m["content"] for m in rows[0]["messages"]] == ["Add\n\n1 and 2", "3"]


HISTORY = {
    "system": "Be brief.", "history": [["Hello", "Hi"], ["How are you?", "Fine"]], "instruction": "Add", "input": "1 and 2",
    "output": "3",
}  # fmt: skip


def roles_and_texts(rows):
    return [[(message["role"], message["content"]) for message in row["messages"]] for row in rows]


def test_earlier_turns_of_alpaca_rows_become_messages(tmp_path):
    plain = {"system": None, "history": [], "instruction": "Add", "input": None, "output": "3"}
    rows, _ = load(arguments(write(tmp_path / "rows.jsonl", [HISTORY, plain]), prompt_template="chat"))
    turns = [("user", "Hello"), ("assistant", "Hi"), ("user", "How are you?"), ("assistant", "Fine")]
    assert roles_and_texts(rows) == [
        [("system", "Be brief."), *turns, ("user", "Add\n\n1 and 2"), ("assistant", "3")],
        [("user", "Add"), ("assistant", "3")],
    ]


def test_earlier_turns_of_alpaca_rows_precede_the_instruction(tmp_path):
    rows, _ = load(arguments(write(tmp_path / "rows.jsonl", [HISTORY] * 2)))
    assert rows[0] == {
        "prompt": "Be brief.\n\n### Instruction:\nHello\n\n### Response:\nHi\n\n### Instruction:\nHow are you?\n\n"
        "### Response:\nFine\n\n### Instruction:\nAdd\n\n### Input:\n1 and 2\n\n### Response:\n",
        "completion": "3",
    }


@pytest.mark.parametrize("history", [["Hello", "Hi"], [["Hello"]], [["Hello", None]], "Hello"])
@pytest.mark.parametrize("template", ["alpaca", "chat"])
def test_history_that_is_no_list_of_pairs_is_refused(history, template, tmp_path):
    rows = [HISTORY | {"history": None}, HISTORY | {"history": history}]
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: history has .*Hello.* not a pair"):
        load(arguments(write(tmp_path / "rows.jsonl", rows), prompt_template=template))


def test_sharegpt_conversations_become_messages(tmp_path):
    sharegpt = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    named = [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}]
    rows, _ = load(arguments(write(tmp_path / "rows.jsonl", [{"conversations": sharegpt}, {"conversations": named}])))
    assert roles_and_texts(rows) == [
        [("system", "s"), ("user", "q"), ("assistant", "a")],
        [("user", "q"), ("assistant", "a")],
    ]
    chatml = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    file = write(tmp_path / "chatml.jsonl", [{"conversations": chatml, "system": "s"}, {"conversations": chatml}])
    assert roles_and_texts(load(arguments(file))[0]) == [
        [("system", "s"), ("user", "q"), ("assistant", "a")],
        [("user", "q"), ("assistant", "a")],
    ]


def test_unknown_sender_of_a_conversation_is_refused(tmp_path):
    good = {"conversations": [{"from": "human", "value": "q"}]}
    file = write(tmp_path / "rows.jsonl", [good, {"conversations": [{"from": "observation", "value": "42"}]}])
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: a message is from 'observation'. Use one of human, gpt"):
        load(arguments(file))


def test_columns_that_are_not_used_are_printed(tmp_path, capsys):
    load(arguments(write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b", "system": "c", "id": 1}] * 2)))
    assert "rows.jsonl: unused columns: system, id\n" in capsys.readouterr().out
    load(arguments(write(tmp_path / "rows.jsonl", [HISTORY] * 2)))
    assert "not used" not in capsys.readouterr().out


def test_prompt_and_completion_precede_messages_as_in_sfttrainer(tmp_path, capsys):
    row = {"messages": [{"role": "user", "content": "hi"}], "prompt": "a", "completion": "b"}
    load(arguments(write(tmp_path / "rows.jsonl", [row] * 4)))
    assert "unused columns: messages" in capsys.readouterr().out


def test_other_text_column_by_name(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"content": "a"}] * 2)
    rows, _ = load(arguments(file, dataset_text_field="content"))
    assert rows.column_names == ["content"]


def test_unknown_columns_are_listed_with_the_formats_known(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"question": "a", "reply": "b"}] * 2)
    with pytest.raises(DataError, match=r"question.*reply") as error:
        load(arguments(file))
    assert "messages" in str(error.value)
    assert "instruction" in str(error.value)


def test_json_array_parquet_and_folder_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "array.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}]))
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), tmp_path / "rows.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "part1.jsonl", [{"text": "a"}] * 3)
    write(folder / "part2.jsonl", [{"text": "a"}] * 2)
    write(folder / "test.jsonl", [{"text": "a"}])
    assert len(load(arguments(tmp_path / "array.json"))[0]) == 2
    assert len(load(arguments(tmp_path / "rows.parquet"))[0]) == 3
    train, evaluation = load(arguments(folder, eval_strategy="epoch"))
    assert (len(train), len(evaluation)) == (5, 1)


def test_rows_are_held_out_for_evaluation(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"text": str(i)} for i in range(50)])
    train, evaluation = load(arguments(file, eval_strategy="epoch", validation_split_percentage=4.0))
    assert (len(train), len(evaluation)) == (48, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nothing.jsonl", "does not exist"),
        (lambda p: write(p / "empty.jsonl", []), "has no rows"),
        (lambda p: (p / "empty.json").write_text("[]\n") and p / "empty.json", "has no rows"),
        (lambda p: write(p / "one.jsonl", [{"text": "a"}]), "1 rows for 2 ranks"),
        (lambda p: p, "no readable data"),
        (lambda p: write(p / "rows.csv", [{"text": "a"}]), "no readable data"),
    ],
)
def test_data_that_cannot_be_trained_on_is_one_error(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        load(arguments(make(tmp_path)))


def test_evaluation_without_a_split_is_refused(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"text": "a"}] * 4)
    with pytest.raises(DataError, match="validation_split_percentage"):
        load(arguments(file, eval_strategy="steps"))


def test_evaluation_of_a_mixture_without_held_out_rows_is_refused(tmp_path):
    (tmp_path / "rows").mkdir()
    for name in ("train", "test"):
        write(tmp_path / "rows" / f"{name}.jsonl", [{"text": "a"}] * 4)
    mixed = arguments("unused", eval_strategy="steps")
    mixed.mixture = DatasetMixtureConfig(datasets=[DatasetConfig(path=str(tmp_path / "rows"))])
    with pytest.raises(DataError, match="Set test_split_size"):
        load(mixed)


def test_missing_split_is_named(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"text": "a"}] * 4)
    with pytest.raises(DataError, match="training"):
        load(arguments(file, dataset_train_split="training"))
