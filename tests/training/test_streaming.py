"""A stream resumes at any row, on the same or another number of ranks, and reads only a few rows again."""

import json

import pytest
import yaml

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.arguments import parse_arguments
from hf_fsdp_recipes.training.data.dataset_parts import load_parts
from hf_fsdp_recipes.training.data.preparation import Preparation
from hf_fsdp_recipes.training.data.stream_trainer import restore_position
from hf_fsdp_recipes.training.data.streaming import RowStream, StreamSource, open_streams
from hf_fsdp_recipes.training.tokenizer import load_tokenizer, tokenizer_for_rows


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def numbered(count, prefix="row"):
    return [f"{prefix} {number} of it" for number in range(count)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows").mkdir()
    return tmp_path / "rows"


@pytest.fixture
def recipe(tiny_model, folder, tmp_path, monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def parse(**settings):
        defaults = {
            "model_name_or_path": str(tiny_model("llama")), "output_dir": str(tmp_path / "run"), "max_length": 64,
            "report_to": "none", "max_steps": 5, "shuffle_buffer_size": 10,
        }  # fmt: skip
        defaults |= (
            {"streaming": True} if "datasets" in settings else {"dataset_streaming": True, "dataset_name": str(folder)}
        )
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(defaults | settings))
        return parse_arguments(["--config", str(tmp_path / "recipe.yaml")])

    return parse


def open_rank(arguments, rank=0, num_ranks=1):
    tokenizer = load_tokenizer(arguments)
    sources = [StreamSource(part.name, part.train, part.fraction, rank, num_ranks) for part in load_parts(arguments)]
    stream = RowStream(
        sources, Preparation(arguments, tokenizer), arguments.training.packing, 7, arguments.recipe.shuffle_buffer_size
    )
    return stream, tokenizer


def texts(stream, tokenizer, count):
    rows = iter(stream)
    found = [tokenizer.decode(next(rows)["input_ids"]).removesuffix("<|end|>") for _ in range(count)]
    rows.close()
    return found


CASES = {
    "one file": (1, {}),
    "three files": (3, {}),
    "in order": (2, {"shuffle_buffer_size": 0}),
    "packed": (1, {"packing": True, "max_length": 32}),
    "wrapped": (2, {"packing": True, "packing_strategy": "wrapped", "max_length": 32}),
}


@pytest.mark.parametrize(
    ("case", "stop"),
    [("one file", 1), ("one file", 10), ("three files", 28), ("in order", 10), ("packed", 1), ("wrapped", 9)],
)
def test_stream_resumes_at_the_row_where_it_stopped(case, stop, recipe, folder):
    num_files, settings = CASES[case]
    for index in range(num_files):
        write(folder / f"{index}.jsonl", numbered(37)[index::num_files])
    arguments = recipe(**settings)
    expected = texts(*open_rank(arguments, 1, 2), 40)
    found, state = [], None
    for count in (stop, 3, 37 - stop):  # stopped and resumed twice
        stream, tokenizer = open_rank(arguments, 1, 2)
        stream.first_block()  # a run reads the first block before it looks for a checkpoint
        if state is not None:
            stream.load_state_dict(state)
        found += texts(stream, tokenizer, count)
        state = json.loads(json.dumps(stream.state_dict()))  # as a checkpoint keeps it
    assert found == expected


def test_resuming_reads_one_block_again(recipe, folder):
    write(folder / "rows.jsonl", numbered(500))
    arguments = recipe(shuffle_buffer_size=50)
    stream, tokenizer = open_rank(arguments)
    texts(stream, tokenizer, 405)
    later, _ = open_rank(arguments)
    later.load_state_dict(stream.state_dict())
    later.first_block()
    assert later.counts.num_rows == 50
    assert later.sources[0].num_read == 450


@pytest.mark.parametrize(("num_files", "num_ranks"), [(1, 2), (2, 2), (4, 2), (3, 2)])
def test_ranks_read_every_row_of_a_pass_once(num_files, num_ranks, recipe, folder):
    for index in range(num_files):
        write(folder / f"{index}.jsonl", numbered(24)[index::num_files])
    arguments = recipe()
    found = [text for rank in range(num_ranks) for text in texts(*open_rank(arguments, rank, num_ranks), 12)]
    assert sorted(found) == sorted(numbered(24))


def test_every_block_and_pass_is_shuffled_differently(recipe, folder):
    write(folder / "rows.jsonl", numbered(20))
    found = texts(*open_rank(recipe()), 40)
    assert found[:20] != numbered(20)
    assert sorted(found[:10]) == sorted(numbered(20)[:10])
    assert found[:20] != found[20:]
    assert sorted(found[:20]) == sorted(found[20:]) == sorted(numbered(20))
    assert texts(*open_rank(recipe(shuffle_buffer_size=0)), 40) == numbered(20) * 2


def test_streams_are_mixed_by_fraction_and_resumed(recipe, tmp_path):
    write(tmp_path / "a.jsonl", numbered(300, "a"))
    write(tmp_path / "b.jsonl", numbered(20, "b"))
    parts = [{"path": str(tmp_path / "a.jsonl"), "fraction": 3}, {"path": str(tmp_path / "b.jsonl"), "fraction": 1}]
    arguments = recipe(datasets=parts, shuffle_buffer_size=40)
    expected = texts(*open_rank(arguments), 200)
    assert 30 < sum(text.startswith("b") for text in expected) < 70  # more than b's 20 rows: b restarts
    stream, tokenizer = open_rank(arguments)
    texts(stream, tokenizer, 105)
    later, _ = open_rank(arguments)
    later.load_state_dict(stream.state_dict())
    assert texts(later, tokenizer, 95) == expected[105:]


@pytest.mark.parametrize("num_rows", [20, 130])
def test_fractions_hold_although_a_part_has_fewer_rows_than_a_block_needs(num_rows, recipe, tmp_path):
    write(tmp_path / "a.jsonl", numbered(2000, "a"))
    write(tmp_path / "b.jsonl", numbered(num_rows, "b"))
    parts = [{"path": str(tmp_path / f"{name}.jsonl"), "fraction": 0.5} for name in "ab"]
    arguments = recipe(datasets=parts, shuffle_buffer_size=400)
    expected = texts(*open_rank(arguments), 1200)
    assert sum(text.startswith("b") for text in expected) == pytest.approx(600, abs=60)
    stream, tokenizer = open_rank(arguments)
    texts(stream, tokenizer, 500)
    later, _ = open_rank(arguments)
    later.load_state_dict(stream.state_dict())
    assert texts(later, tokenizer, 700) == expected[500:]


def test_unusable_rows_of_a_stream_are_dropped_and_counted(recipe, folder):
    (folder / "rows.jsonl").write_bytes(
        b"".join(b'{"text": "%s"}\n' % text for text in (b"one", b"", b"bad \xff", b"<|end|>", b"two"))
        + b'{"text": null}\n'
    )
    stream, tokenizer = open_rank(recipe())
    assert sorted(texts(stream, tokenizer, 2)) == ["one", "two"]
    assert stream.counts.describe(64) == "kept 2 of 6 rows; dropped 2 empty, 1 not UTF-8, 1 with special tokens only"


def test_stream_without_usable_rows_is_an_error_and_not_a_hang(recipe, folder):
    write(folder / "rows.jsonl", [""] * 30)
    with pytest.raises(DataError, match="nothing to train on: kept 0 of"):
        open_streams(recipe(), load_tokenizer(recipe()), folder.parent / "evaluation")


def test_rank_without_rows_is_an_error(recipe, folder):
    write(folder / "rows.jsonl", ["only one"])
    with pytest.raises(DataError, match="Use fewer ranks"):
        open_rank(recipe(), 1, 2)[0].first_block()


def test_stream_of_empty_objects_is_an_error(recipe, folder):
    (folder / "rows.jsonl").write_text("{}\n" * 3)
    with pytest.raises(DataError, match="has no rows"):
        open_streams(recipe(), load_tokenizer(recipe()), folder.parent / "evaluation")


def test_broken_line_of_a_stream_is_named_when_it_is_reached(recipe, folder):
    write(folder / "a.jsonl", numbered(30))
    (folder / "b.jsonl").write_text('{"text": "good"}\n{"text": \n')
    stream, tokenizer = open_rank(recipe(shuffle_buffer_size=10))
    with pytest.raises(DataError, match=r"b\.jsonl cannot be read: line 2, column 9: Expecting value"):
        texts(stream, tokenizer, 60)


def test_row_number_of_a_later_block_is_right(recipe, folder):
    rows = [{"input_ids": [5, 6, 7]}] * 24 + [{"input_ids": [5, -7]}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream, tokenizer = open_rank(recipe(shuffle_buffer_size=10))
    with pytest.raises(DataError, match=r"rows, row 25: input_ids has -7"):
        texts(stream, tokenizer, 40)
    stream, tokenizer = open_rank(recipe(shuffle_buffer_size=10), 0, 2)
    with pytest.raises(DataError, match=r"rows \(rank 0's part\), row 13: input_ids has -7"):
        texts(stream, tokenizer, 40)


def test_template_that_rejects_a_thousand_rows_ends_an_endless_search(recipe, folder, tmp_path):
    message = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "rows.jsonl").write_text((json.dumps(message) + "\n") * 3000)
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('no such thing') }}")
    arguments = recipe(chat_template_path=str(tmp_path / "strict.jinja"), shuffle_buffer_size=500)
    tokenizer = tokenizer_for_rows(load_tokenizer(arguments), arguments.training)
    with pytest.raises(DataError, match=r"0 of 1,000 rows; dropped 1,000 rejected .*\(line 1: no such thing\)"):
        open_streams(arguments, tokenizer, tmp_path / "evaluation")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": ""}\n', "nothing to train on: kept 0 of 1 rows"),
        ('{"text": "a"}\n{"text": \n', r"test\.jsonl cannot be read: line 2"),
    ],
)
def test_evaluation_rows_of_a_stream_are_checked_before_training(content, message, recipe, folder):
    write(folder / "train.jsonl", numbered(30))
    (folder / "test.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        open_streams(
            recipe(eval_strategy="steps", eval_steps=1), load_tokenizer(recipe()), folder.parent / "evaluation"
        )


@pytest.mark.parametrize("num_rows", [999, 1000, 2000])
def test_evaluation_rows_are_read_once_whatever_their_number(num_rows, recipe, folder):
    write(folder / "train.jsonl", numbered(30))
    write(folder / "test.jsonl", numbered(num_rows))
    rows = open_streams(
        recipe(eval_strategy="steps", eval_steps=1), load_tokenizer(recipe()), folder.parent / "evaluation"
    )
    assert len(list(rows.evaluation)) == num_rows


def test_evaluation_rows_of_a_stream_end(recipe, folder):
    write(folder / "train.jsonl", numbered(30))
    write(folder / "test.jsonl", numbered(25))
    rows = open_streams(
        recipe(eval_strategy="steps", eval_steps=1), load_tokenizer(recipe()), folder.parent / "evaluation"
    )
    assert len(list(rows.evaluation)) == len(list(rows.evaluation)) == 25


def save_positions(directory, arguments, num_ranks, count):
    directory.mkdir()
    for rank in range(num_ranks):
        stream, tokenizer = open_rank(arguments, rank, num_ranks)
        texts(stream, tokenizer, count)
        text = json.dumps({"world_size": num_ranks} | stream.state_dict())
        (directory / f"stream_{rank}.json").write_text(text)


def test_another_number_of_ranks_skips_the_rows_read(recipe, folder, tmp_path, capsys):
    write(folder / "rows.jsonl", numbered(80))
    arguments = recipe()
    save_positions(tmp_path / "checkpoint", arguments, 2, 20)  # 40 rows in all: 2 full blocks of 10 per rank
    stream, tokenizer = open_rank(arguments)
    stream.first_block()  # a run reads the first block before it looks for a checkpoint
    assert restore_position(stream, tmp_path / "checkpoint")
    said = capsys.readouterr().out
    assert "was split over 2 ranks and is now split over 1" in said
    # Each rank's last block repeats although all its rows were used: only the start of a block is a known position.
    assert sorted(texts(stream, tokenizer, 60)) == sorted(numbered(80)[20:])


def test_checkpoint_of_another_stream_or_of_none_is_reported(recipe, folder, tmp_path, capsys):
    write(folder / "rows.jsonl", numbered(30))
    save_positions(tmp_path / "checkpoint", recipe(), 1, 5)
    (tmp_path / "empty").mkdir()
    other = write(tmp_path / "other.jsonl", numbered(30, "other"))
    stream, _ = open_rank(recipe(dataset_name=str(other)))
    assert not restore_position(stream, tmp_path / "empty")
    assert restore_position(stream, tmp_path / "checkpoint")
    said = capsys.readouterr().out
    assert "has no stream position" in said
    assert "starting at its first row" in said


def test_mixture_with_other_fractions_repeats_the_block(recipe, folder, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    for path in (folder, other):
        write(path / "rows.jsonl", numbered(80))

    def mixture(*fractions):
        paths = zip((folder, other), fractions, strict=True)
        return recipe(datasets=[{"path": str(path), "fraction": fraction} for path, fraction in paths])

    save_positions(tmp_path / "checkpoint", mixture(0.5, 0.5), 1, 25)
    stream, _ = open_rank(mixture(0.8, 0.2))
    assert restore_position(stream, tmp_path / "checkpoint")
    assert "fractions [0.5, 0.5] -> [0.8, 0.2], so each rank's last block" in capsys.readouterr().out
    assert stream.state_dict()["offset"] == 0


def test_other_settings_repeat_the_block_and_say_so(recipe, folder, tmp_path, capsys):
    write(folder / "rows.jsonl", numbered(80))
    save_positions(tmp_path / "checkpoint", recipe(), 1, 25)  # stopped in the third block of 10 rows
    stream, tokenizer = open_rank(recipe(shuffle_buffer_size=0))
    assert restore_position(stream, tmp_path / "checkpoint")
    assert (
        "shuffle_buffer_size 10 -> 0, so each rank's last block is prepared and trained again"
        in capsys.readouterr().out
    )
    assert texts(stream, tokenizer, 60) == numbered(80)[20:]
