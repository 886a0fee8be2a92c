"""Unreadable data files give one DataError with file, line and reason; hidden files are skipped."""

import json
import os

import pytest

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.data.data_files import explain_errors
from hf_fsdp_recipes.training.data.dataset_parts import read_splits


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Return a function that writes files and returns the rows of all splits, loaded or streamed."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def read(files, streaming):
        folder = tmp_path / "rows"
        for name, content in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        name = str(folder / next(iter(files))) if len(files) == 1 else str(folder)
        with explain_errors(name):
            return [row for rows in read_splits(name, None, streaming).values() for row in rows]

    return read


TEXT = lines({"text": "a"}, {"text": "b"})
FAULTS = {
    "broken line": ({"a.jsonl": TEXT + '{"text": "c"\n' + TEXT}, r"a\.jsonl cannot be read: line 3, column 13: Expecting"),
    "broken line after a blank one": ({"a.jsonl": TEXT + "\n" + "{c}\n"}, r"a\.jsonl cannot be read: line 4, column 2: "),
    "broken list": ({"a.json": '[{"text": "a"},\n{"text" "b"}]'}, r"a\.json cannot be read: line 2, column 9: "),
    "number on a line": ({"a.jsonl": TEXT + "7\n"}, r"a\.jsonl cannot be read: line 3 is 7, not an object"),
    "list on a line": ({"a.jsonl": TEXT + '["a"]\n'}, r'line 3 is \["a"\], not an object'),
    "numbers only": ({"a.jsonl": "1\n2\n"}, r"starts with '1\\n2', not with a JSON object"),
    "null": ({"a.jsonl": "null\n"}, "starts with 'null'"),
    "UTF-16": ({"a.jsonl": TEXT.encode("utf-16")}, "in UTF-8"),
    "rows inside an object": ({"a.json": '{"version": "1", "data": [{"text": "a"}]}'}, r"a\.json is .* the rows in 'data'"),
    "rows inside an object over several lines": (
        {"a.json": json.dumps({"data": [{"text": "a"}]}, indent=2)},
        r"a\.json is .* the rows in 'data'",
    ),
    "empty object": ({"a.json": "{}"}, "has no rows with columns"),
    "empty objects": ({"a.jsonl": "{}\n{}\n"}, "has no rows with columns"),
    "white space": ({"a.jsonl": "\n" * 40}, "has no rows"),
    "no bytes": ({"a.jsonl": ""}, "has no rows"),
    "no bytes in parquet": ({"a.parquet": ""}, "has no rows"),
    "not parquet": ({"a.parquet": "hello, this is a text"}, r"a\.parquet cannot be read: .*[Pp]arquet"),
    "broken line in the second file": ({"a.jsonl": TEXT, "b.jsonl": TEXT + "{oops\n"}, r"b\.jsonl cannot be read: line 3"),
    "other columns in the second file": (
        {"a.jsonl": TEXT, "b.jsonl": lines({"body": "a"})},
        r"a\.jsonl and .*b\.jsonl differ: the first has text \(string\), the second body \(string\)",
    ),
    "more columns in the second file": (
        {"a.jsonl": TEXT, "b.jsonl": lines({"text": "a", "source": 1})},
        r"the first has no other columns, the second source \(number\)",
    ),
    "another type in the second file": (
        {"a.jsonl": TEXT, "b.jsonl": lines({"text": ["a"]})},
        r"the first has text \(string\), the second text \(list\)",
    ),
    "other columns in the test file": ({"train.jsonl": TEXT, "test.jsonl": lines({"body": "a"})}, "differ: "),
    "csv": ({"a.csv": "text\na\n"}, r"only \.csv files\. Convert them to \.json"),
    "csv and no extension": ({"a.csv": "text\na\n", "README": "b"}, r"only \.csv, README files\."),
    "two file types": ({"a.txt": "a\n", "b.jsonl": TEXT}, r"mixes file types: a\.txt, b\.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", FAULTS)
def test_file_that_cannot_be_read_is_named_with_line_and_reason(case, streaming, read):
    files, message = FAULTS[case]
    if streaming and case in ("empty object", "empty objects"):
        assert read(files, streaming) == []  # StreamSource refuses them later
        return
    with pytest.raises(DataError, match=message) as error:
        read(files, streaming)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_hidden_files_and_folders_are_not_read(streaming, read):
    hidden = lines({"text": "hidden"})
    files = {
        "a.jsonl": TEXT, "._a.jsonl": b"\x00\x05\x16\x07", ".ipynb_checkpoints/a-checkpoint.jsonl": hidden, ".git/b.jsonl": hidden,
        "__MACOSX/c.jsonl": hidden, "deep/.hidden/d.jsonl": hidden, "deep/e.jsonl": lines({"text": "c"}),
    }  # fmt: skip
    assert [row["text"] for row in read(files, streaming)] == ["a", "b", "c"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt", "a.parquet"])
def test_files_without_rows_among_others_are_skipped_with_a_warning(name, streaming, read, tmp_path, caplog):
    import pandas

    pandas.DataFrame({"text": ["a", "b"]}).to_parquet(tmp_path / "good.parquet")
    good = {".txt": b"a\nb\n", ".parquet": (tmp_path / "good.parquet").read_bytes()}.get(name[1:], TEXT.encode())
    rows = read({name: good, f"b{name[1:]}": "", f"test{name[1:]}": ""}, streaming)
    assert [row["text"] for row in rows] == ["a", "b"]
    assert f"skipped 2 of 3 files, which have no rows: b{name[1:]}, test{name[1:]}" in caplog.text


def test_data_files_of_other_types_are_named(read, caplog):
    read({"a.jsonl": TEXT, "b.jsonl.gz": "", "c.csv": "", "README.md": ""}, False)
    assert "2 data files are not read" in caplog.text and "b.jsonl.gz, c.csv" in caplog.text


def test_conversation_in_one_object_is_a_row(read):
    row = {"messages": [{"role": "user", "content": "a"}]}
    assert read({"a.json": json.dumps(row)}, False) == [row]


def test_folder_below_a_hidden_folder_is_read(tmp_path):
    folder = tmp_path / ".cache" / "rows"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text(TEXT)
    assert len(read_splits(str(folder))["train"]) == 2
    os.rename(folder / "a.jsonl", folder / ".a.jsonl")
    with pytest.raises(DataError, match="has no readable data, because it has no files"):
        read_splits(str(folder))
    assert len(read_splits(str(folder / ".a.jsonl"))["train"]) == 2  # asked for by name


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.json", json.dumps([{"text": "a"}, {"text": "b"}])),
        ("indented.json", "\n" + json.dumps([{"text": "a"}, {"text": "b"}], indent=2)),
        ("strings.json", '["a", "b"]'),
        ("UPPER.JSONL", TEXT),
        ("mark.jsonl", b"\xef\xbb\xbf" + TEXT.encode()),
    ],
)
def test_json_is_read_in_every_form(name, content, streaming, read):
    assert [row["text"] for row in read({name: content}, streaming)] == ["a", "b"]


def test_object_over_several_lines_is_one_row(read):
    assert read({"a.json": json.dumps({"text": "a"}, indent=2)}, False) == [{"text": "a"}]
