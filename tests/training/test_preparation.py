"""Rows are prepared exactly as SFTTrainer would prepare them; unusable rows are dropped and counted."""

import json
from pathlib import Path

import pytest
import trl
import yaml

from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.arguments import parse_arguments
from hf_fsdp_recipes.training.data.preparation import Preparation, prepare
from hf_fsdp_recipes.training.data.row_tokenizer import MAX_CHARACTERS, RowTokenizer
from hf_fsdp_recipes.training.data.streaming import open_streams
from hf_fsdp_recipes.training.tokenizer import load_tokenizer, tokenizer_for_rows, tokenizer_hash
from tests.conftest import SENTENCES

MARKED_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A template that lists the tools and uses the template argument `mood`.
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% if mood %}<|system|>{{ mood }}<|end|>{% endif %}"
    + MARKED_TEMPLATE
)
TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ANSWER = {"role": "assistant", "content": "yes it is"}
MESSAGES = [{"messages": [{"role": "user", "content": s}, ANSWER]} for s in SENTENCES[:12]]
COMPLETIONS = [{"prompt": s.split(" over")[0], "completion": " over" + s.split(" over")[1]} for s in SENTENCES[:12]]
TEXTS = [{"text": s} for s in SENTENCES]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def recipe(tiny_model, tmp_path, monkeypatch):
    """Return a function that parses a recipe of these settings."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama")

    def parse(rows=None, template=None, **settings):
        if rows is not None:
            settings["dataset_name"] = str(write(tmp_path / "rows.jsonl", rows))
        if template is not None:
            (tmp_path / "template.jinja").write_text(template)
            settings["chat_template_path"] = str(tmp_path / "template.jinja")
        defaults = {
            "model_name_or_path": str(model), "output_dir": str(tmp_path / "run"), "max_length": 48, "report_to": "none"
        }  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(defaults | settings))
        return parse_arguments(["--config", str(tmp_path / "recipe.yaml")])

    return parse


def prepared(arguments):
    return prepare(arguments, tokenizer_for_rows(load_tokenizer(arguments), arguments.training))


def learned(rows, tokenizer):
    """Return the texts of the tokens that have labels, one text per run of such tokens."""
    found = []
    for row in rows:
        runs, was_learned = [], False
        for token in row["labels"]:
            if token != -100:
                runs = [*runs, [token]] if not was_learned else [*runs[:-1], [*runs[-1], token]]
            was_learned = token != -100
        found += [tokenizer.decode(run) for run in runs]
    return found


CHAT_COMPLETIONS = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in MESSAGES]
TOOLS = json.dumps([{"name": "add"}])
TOKENS = [{"input_ids": list(range(10 + n, 40 + n))} for n in range(12)]
CASES = {
    "text": (TEXTS, {}),
    "text, end token included": ([{"text": s + "<|end|>"} for s in SENTENCES], {}),
    "text, truncated": (TEXTS, {"max_length": 16}),
    "text, end kept": (TEXTS, {"max_length": 16, "truncation_mode": "keep_end"}),
    "text, shuffled": (TEXTS, {"shuffle_dataset": True}),
    "text, packed": (TEXTS, {"packing": True}),
    "text, packed and truncated": (TEXTS, {"packing": True, "max_length": 16, "truncation_mode": "keep_end"}),
    "text, packed and shuffled": (TEXTS, {"packing": True, "shuffle_dataset": True}),
    "text, wrapped": (TEXTS, {"packing": True, "packing_strategy": "wrapped"}),
    "text, split": (TEXTS, {"packing": True, "packing_strategy": "bfd_split", "max_length": 16}),
    "text in another column": ([{"body": s, "other": 1} for s in SENTENCES], {"dataset_text_field": "body"}),
    "completions": (COMPLETIONS, {}),
    "completions, packed": (COMPLETIONS, {"packing": True}),
    "completions, prompts learned": (COMPLETIONS, {"completion_only_loss": False}),
    "completions, text column": ([row | {"text": "both"} for row in COMPLETIONS], {}),
    "completions, merged tokens": ([{"prompt": "the rive", "completion": "r runs"}] * 4, {}),
    "completions of messages": (CHAT_COMPLETIONS, {}),
    "completions of messages, assistant only": (CHAT_COMPLETIONS, {"assistant_only_loss": True, "template": MARKED_TEMPLATE}),
    "completions of messages, prompts learned": (CHAT_COMPLETIONS, {"completion_only_loss": False, "packing": True}),
    "messages": (MESSAGES, {}),
    "messages of parts": (
        [{"messages": [{"role": "user", "content": [{"type": "text", "text": s}]}]} for s in SENTENCES[:12]], {"max_length": 99}
    ),
    "messages, wrapped": (MESSAGES, {"packing": True, "packing_strategy": "wrapped"}),
    "messages, assistant only": (MESSAGES, {"assistant_only_loss": True, "template": MARKED_TEMPLATE}),
    "messages, assistant only, packed": (
        MESSAGES, {"assistant_only_loss": True, "packing": True, "template": MARKED_TEMPLATE}
    ),
    "messages, assistant only, template of TRL": (
        MESSAGES, {"assistant_only_loss": True, "template": (TRL_TEMPLATES / "qwen3.jinja").read_text(), "max_length": 99}
    ),
    "messages, tools": ([row | {"tools": TOOLS} for row in MESSAGES], {"template": TOOL_TEMPLATE, "max_length": 99}),
    "messages, template arguments": (
        [row | {"chat_template_kwargs": {"mood": "calm"}} for row in MESSAGES], {"template": TOOL_TEMPLATE, "max_length": 99}
    ),
    "tokens": (TOKENS, {}),
    "tokens, packed": (TOKENS, {"packing": True}),
    "tokens with labels": ([row | {"labels": [-100] * 9 + row["input_ids"][9:]} for row in TOKENS], {"max_length": 20}),
    "tokens with masks": (
        [row | {"completion_mask": [0] * 9 + [1] * 21, "assistant_masks": [1] * 20 + [0] * 10} for row in TOKENS],
        {"completion_only_loss": True},
    ),
    "tokens with unused mask": ([row | {"completion_mask": [0] * 9 + [1] * 21} for row in TOKENS], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_prepared_rows_equal_those_of_sfttrainer(case, recipe):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTTrainer

    raw, settings = CASES[case]
    arguments = recipe(raw, **settings)
    ours = prepared(arguments).train
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model.model_name_or_path),
        args=arguments.training,
        train_dataset=Dataset.from_list(raw),
        processing_class=load_tokenizer(arguments),
    )
    columns = ["input_ids", "labels", *(["seq_lengths"] if "seq_lengths" in ours.column_names else [])]
    assert ours.select_columns(columns).to_list() == trainer.train_dataset.select_columns(columns).to_list()


def test_evaluation_rows_follow_eval_packing(recipe):
    settings = {"packing": True, "eval_packing": False, "eval_strategy": "epoch", "validation_split_percentage": 25}
    made = prepared(recipe(TEXTS, **settings))
    assert (len(made.evaluation), made.evaluation.column_names) == (18, ["input_ids", "labels"])
    assert "seq_lengths" in made.train.column_names


@pytest.mark.parametrize("packing", [False, True])
def test_only_completions_are_learned(packing, recipe):
    arguments = recipe(COMPLETIONS, packing=packing, max_length=200)
    rows = prepared(arguments).train
    assert sorted(learned(rows, load_tokenizer(arguments))) == sorted(
        row["completion"] + "<|end|>" for row in COMPLETIONS
    )


@pytest.mark.parametrize("packing", [False, True])
def test_only_the_assistant_is_learned_in_every_turn(packing, recipe):
    turns = [{"role": "user", "content": "one"}, ANSWER, {"role": "user", "content": "two"}, ANSWER]
    arguments = recipe(
        [{"messages": turns}] * 4, packing=packing, max_length=200, assistant_only_loss=True, template=MARKED_TEMPLATE
    )
    rows = prepared(arguments).train
    assert learned(rows, load_tokenizer(arguments)) == ["yes it is<|end|>"] * 8


def test_assistant_only_loss_needs_a_template_with_marks(recipe):
    with pytest.raises(DataError, match=r"chat_template_path .*generation %"):
        prepared(recipe(MESSAGES, assistant_only_loss=True))
    with pytest.raises(DataError, match="has none"):
        prepared(recipe(TEXTS, assistant_only_loss=True, template=MARKED_TEMPLATE))


def test_conversation_without_an_answer_is_dropped_where_answers_are_learned(recipe):
    rows = [*MESSAGES, {"messages": [{"role": "user", "content": "hello?"}]}]
    [counts] = prepared(recipe(rows, assistant_only_loss=True, template=MARKED_TEMPLATE)).counts.values()
    assert counts.describe(48) == "kept 12 of 13 rows; dropped 1 without an answer"
    [counts] = prepared(recipe(rows)).counts.values()
    assert counts.num_kept == 13


def test_answer_that_the_template_does_not_mark_is_dropped(recipe, tmp_path):
    some = tmp_path / "some.jinja"
    some.write_text(MARKED_TEMPLATE.replace("== 'assistant'", "== 'assistant' and message['content'] != 'no'"))
    rows = [*MESSAGES, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "no"}]}]
    [counts] = prepared(recipe(rows, assistant_only_loss=True, chat_template_path=str(some))).counts.values()
    assert counts.describe(48) == "kept 12 of 13 rows; dropped 1 with no answer marked by the chat template"
    with pytest.raises(DataError, match="0 of 1 rows; dropped 1 with no answer marked"):
        prepared(recipe(rows[-1:], assistant_only_loss=True, chat_template_path=str(some)))


def test_rows_that_cannot_be_trained_on_are_dropped_and_counted(recipe):
    rows = [
        *TEXTS[:5], {"text": ""}, {"text": " \n"}, {"text": None}, {"text": "<|end|>"}, {"text": "<|bos|><|end|>"},
        {"text": " ".join(SENTENCES)},
    ]  # fmt: skip
    made = prepared(recipe(rows))
    [counts] = made.counts.values()
    assert (
        counts.describe(48)
        == "kept 6 of 11 rows; dropped 3 empty, 2 with special tokens only; truncated 1 to 48 tokens"
    )
    assert len(made.train) == 6
    assert max(len(row["input_ids"]) for row in made.train) == 48


def test_completion_beyond_max_length_is_dropped(recipe):
    rows = [
        *COMPLETIONS,
        {"prompt": " ".join(SENTENCES), "completion": "never seen"},
        {"prompt": "a", "completion": ""},
    ]
    made = prepared(recipe([*rows, {"prompt": None, "completion": "b"}]))
    [counts] = made.counts.values()
    assert counts.describe(48) == (
        "kept 12 of 15 rows; dropped 1 empty, 1 without an answer, 1 with nothing to learn in the first 48 tokens"
    )


def test_malformed_conversations_are_dropped(recipe):
    user = {"role": "user", "content": "a"}
    rows = [
        *MESSAGES[:3], {"messages": []}, {"messages": None}, {"messages": [user, {"role": "assistant", "content": None}]},
        {"messages": [{"role": "user", "content": ""}]}, {"messages": [{"role": None, "content": "x"}]},
    ]  # fmt: skip
    [counts] = prepared(recipe(rows)).counts.values()
    assert counts.describe(48) == "kept 3 of 8 rows; dropped 5 empty"
    for answers_only in (False, True):  # also with the malformed rows first
        [counts] = prepared(
            recipe(rows[::-1], assistant_only_loss=answers_only, template=MARKED_TEMPLATE)
        ).counts.values()
        assert counts.num_kept == 3


def test_conversations_that_the_template_rejects_are_dropped(recipe, tmp_path):
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + MARKED_TEMPLATE
    )
    rows = [*MESSAGES[:3], {"messages": [ANSWER]}]
    [counts] = prepared(recipe(rows, chat_template_path=str(strict))).counts.values()
    assert counts.describe(48) == "kept 3 of 4 rows; dropped 1 rejected by the chat template (line 1: user first)"
    with pytest.raises(DataError, match=r"dropped 1 rejected by the chat template \(line 1: user first\)\. Check"):
        prepared(recipe(rows[-1:], chat_template_path=str(strict)))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("{% for message in messages %}\n{% bogus %}{% endfor %}", "line 2: Encountered unknown tag 'bogus'"),
        ("{% for message in messages %}", "line 1: Unexpected end of template"),
        ("a\nb\n{{ messages | nonsense }}", "line 3: No filter named 'nonsense'"),
    ],
)
def test_chat_template_with_a_syntax_error_is_refused_with_the_line(broken, reason, recipe):
    arguments = recipe(MESSAGES, template=broken)
    with pytest.raises(DataError, match=rf"chat_template_path: .*template\.jinja is not valid Jinja, {reason}"):
        prepared(arguments)
    arguments.training.chat_template_path = None
    tokenizer = load_tokenizer(arguments)
    tokenizer.chat_template = broken
    with pytest.raises(DataError, match=rf"the tokenizer's chat template is not valid Jinja, {reason}"):
        prepare(arguments, tokenizer)


def test_chat_template_that_fails_on_every_row_is_refused_with_the_line(recipe):
    with pytest.raises(DataError, match=r"12 rejected by the chat template \(line 2: 'date' is undefined\)"):
        prepared(recipe(MESSAGES, template="\n{{ date.today }}"))


IDS = {"input_ids": [5, 6, 7, 8]}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"input_ids": [5, 99_999]}, "input_ids has 99999, but values must be at least 0 and below "),
        ({"input_ids": [5, -1]}, "input_ids has -1,"),
        ({"input_ids": [2**40, 1]}, "input_ids has 1099511627776,"),
        ({"input_ids": [5, 1.5]}, r"input_ids has 1\.5, which is not an integer"),
        ({"input_ids": [5, None]}, "input_ids has None, which is not an integer"),
        ({"input_ids": ["5", "6"]}, "input_ids has '5', which"),
        ({"input_ids": [True, False]}, "input_ids has True, which"),
        ({"input_ids": "5 6"}, "input_ids is '5 6', not a list of integers"),
        (IDS | {"labels": [5, 6, 7]}, "labels has 3 values for 4 input_ids"),
        (IDS | {"labels": [-100, 6, 7, 99_999]}, "labels has 99999, .*, or -100"),
        (IDS | {"labels": [-1, 6, 7, 8]}, "labels has -1,"),
        (IDS | {"attention_mask": [1, 1]}, "attention_mask has 2 values"),
        (IDS | {"completion_mask": [1, 1, 2, 0]}, "completion_mask has 2, but values must be at least 0 and below 2"),
        (IDS | {"assistant_masks": [1, 1, 1, 1, 1]}, "assistant_masks has 5 values"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_invalid_tokens_are_refused_with_row_and_value(row, fault, streaming, recipe, tmp_path):
    good = {name: [1] * 3 if "mask" in name else [5, 6, 7] for name in row}
    rows = [row, row] if not isinstance(row["input_ids"][0], int) else [good, dict.fromkeys(row), row]
    number = 1 if len(rows) == 2 else 3
    with pytest.raises(DataError, match=rf"rows\.jsonl, row {number}: {fault}"):
        if streaming:
            arguments = recipe(rows, dataset_streaming=True, max_steps=2)
            open_streams(arguments, load_tokenizer(arguments), tmp_path / "evaluation")
        else:
            prepared(recipe(rows))


def test_tokens_added_beyond_a_gap_in_the_vocabulary_are_valid(recipe):
    arguments = recipe([IDS | {"input_ids": [5, 6, 400]}] * 2)
    tokenizer = load_tokenizer(arguments)
    vocabulary = tokenizer.get_vocab() | {"<|far|>": 400}
    tokenizer.get_vocab = lambda: vocabulary
    assert prepare(arguments, tokenizer).train[0]["input_ids"] == [5, 6, 400]


def test_padding_of_tokenized_rows_is_removed(recipe):
    padded = {"input_ids": [0, 0, 5, 6, 7, 0], "attention_mask": [0, 0, 1, 1, 1, 0]}
    [row] = prepared(recipe([padded])).train
    assert row == {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    [row] = prepared(recipe([padded | {"labels": [-100, -100, -100, 6, 7, -100]}])).train
    assert row == {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}


def test_alpaca_rows_without_question_or_answer_are_dropped(recipe):
    good = {"instruction": "Add", "input": "1", "output": "2"}
    rows = [good, good, good | {"instruction": None}, good | {"output": None}, good | {"output": ""}]
    for template in ("alpaca", "chat"):
        [counts] = prepared(recipe(rows, prompt_template=template, max_length=1000)).counts.values()
        assert counts.num_kept == 2, template


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt"])
def test_rows_that_are_not_utf8_are_dropped(name, recipe, tmp_path):
    line = b'{"text": "%s"}\n' if name.endswith("jsonl") else b"%s\n"
    texts = [
        b"good row",
        b"gr\xc3\xbc\xc3\x9fe",
        b"bad \xff\xfe row",
        b"latin gr\xfc\xdfe",
        b"a legitimate \xef\xbf\xbd",
    ]
    (tmp_path / name).write_bytes(b"".join(line % text for text in texts))
    made = prepared(recipe(dataset_name=str(tmp_path / name)))
    [counts] = made.counts.values()
    assert counts.describe(48) == "kept 3 of 5 rows; dropped 2 not UTF-8"
    assert learned(made.train, load_tokenizer(recipe(TEXTS)))[1] == "grüße<|end|>"


def test_giant_text_is_truncated_before_it_is_tokenized(recipe, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    lengths, upstream = [], PreTrainedTokenizerFast.__call__
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "__call__",
        lambda self, text, **k: (lengths.append(len(text)), upstream(self, text, **k))[1],
    )
    giant = {"text": " ".join(SENTENCES) * 500}  # 2.5 MB
    made = prepared(recipe([*TEXTS[:4], giant]))
    [counts] = made.counts.values()
    assert counts.describe(48) == "kept 5 of 5 rows; truncated 1 to 48 tokens"
    assert len(giant["text"]) > 2 * MAX_CHARACTERS
    assert max(lengths) == MAX_CHARACTERS + len("<|end|>")


def test_giant_conversation_is_truncated_before_it_is_tokenized(recipe, monkeypatch):
    giant = {"role": "assistant", "content": " ".join(SENTENCES) * 500}
    rows = [*MESSAGES[:4], {"messages": [{"role": "user", "content": "a"}, giant]}]
    rendered, upstream = [], RowTokenizer._render

    def render(self, messages, row, **options):
        rendered.append(messages)
        return upstream(self, messages, row, **options)

    monkeypatch.setattr(RowTokenizer, "_render", render)
    [counts] = prepared(recipe(rows)).counts.values()
    assert counts.describe(48) == "kept 5 of 5 rows; truncated 1 to 48 tokens"
    assert [len(message["content"]) for message in rendered[-1]] == [1, MAX_CHARACTERS]
    assert [message["role"] for message in rendered[-1]] == ["user", "assistant"]


@pytest.mark.slow
def test_giant_text_is_kept_if_rows_are_not_truncated(recipe):
    giant = {"text": " ".join(SENTENCES) * 205}  # just above a million characters
    made = prepared(recipe([*TEXTS[:4], giant], packing=True, packing_strategy="wrapped"))
    total = sum(len(row["input_ids"]) for row in made.train)
    assert total > len(load_tokenizer(recipe(TEXTS))(giant["text"])["input_ids"])


def test_dataset_without_usable_rows_is_an_error(recipe):
    with pytest.raises(DataError, match=r"nothing to train on: kept 0 of 3 rows; dropped 3 empty"):
        prepared(recipe([{"text": ""}] * 3))


def test_split_sequences_without_labels_are_dropped(recipe):
    rows = [{"prompt": " ".join(SENTENCES), "completion": "short"}] * 3
    made = prepared(recipe(rows, packing=True, packing_strategy="bfd_split"))
    assert all(any(label != -100 for label in row["labels"][1:]) for row in made.train)
    assert sum("short" in text for text in learned(made.train, load_tokenizer(recipe(TEXTS)))) == 3


def test_mixture_draws_by_fraction_from_parts_of_any_format(recipe, tmp_path):
    write(tmp_path / "texts.jsonl", TEXTS * 5)
    write(tmp_path / "chats.jsonl", MESSAGES * 20)
    parts = [
        {"path": str(tmp_path / "texts.jsonl"), "fraction": 3}, {"path": str(tmp_path / "chats.jsonl"), "fraction": 1}
    ]  # fmt: skip
    made = prepared(recipe(datasets=parts))
    chats = sum("yes it is" in text for text in learned(made.train, load_tokenizer(recipe(TEXTS))))
    assert 0.2 < chats / len(made.train) < 0.3
    assert len(made.train) > 400
    assert len(made.counts) == 2
    longer = prepared(recipe(datasets=parts, stopping_strategy="all_exhausted"))
    assert len(longer.train) > len(made.train) * 1.5


def test_mixture_without_fractions_has_all_rows(recipe, tmp_path):
    write(tmp_path / "texts.jsonl", TEXTS)
    write(tmp_path / "chats.jsonl", MESSAGES)
    made = prepared(recipe(datasets=[{"path": str(tmp_path / "texts.jsonl")}, {"path": str(tmp_path / "chats.jsonl")}]))
    assert len(made.train) == len(TEXTS) + len(MESSAGES)


def test_mixture_part_takes_trls_loader_and_files(recipe, tmp_path):
    (tmp_path / "rows.csv").write_text("text,other\n" + "".join(f"row number {i},{i}\n" for i in range(8)))
    part = {"path": "csv", "data_files": str(tmp_path / "rows.csv"), "columns": ["text"]}
    assert len(prepared(recipe(datasets=[part])).train) == 8


def test_mixture_holds_out_rows_of_every_part(recipe, tmp_path):
    write(tmp_path / "texts.jsonl", TEXTS)
    write(tmp_path / "chats.jsonl", MESSAGES)
    parts = [{"path": str(tmp_path / "texts.jsonl")}, {"path": str(tmp_path / "chats.jsonl")}]
    made = prepared(recipe(datasets=parts, eval_strategy="epoch", test_split_size=0.25))
    assert (len(made.train), len(made.evaluation)) == (54 + 9, 18 + 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"datasets": [{"path": "a", "fraction": 1}, {"path": "b"}]}, "every part a positive fraction"),
        ({"dataset_name": "a", "dataset_streaming": True}, "max_steps"),
        ({"datasets": [{"path": "a"}, {"path": "b"}], "streaming": True, "max_steps": 3}, "fraction"),
    ],
)
def test_invalid_data_arguments_are_refused_at_once(settings, words, recipe):
    with pytest.raises(DataError, match=words):
        recipe(**settings)


def test_tokens_of_a_cloned_template_are_used(recipe, tiny_model, tmp_path):
    from transformers import AutoTokenizer

    source = AutoTokenizer.from_pretrained(tiny_model("llama"))
    source.add_tokens(["<|prompter|>"], special_tokens=True)
    source.chat_template = MARKED_TEMPLATE.replace("<|{{ message['role'] }}|>", "<|prompter|>")
    source.save_pretrained(tmp_path / "source")
    arguments = recipe(MESSAGES, chat_template_path=str(tmp_path / "source"))
    rows = prepared(arguments).train
    assert rows[0]["input_ids"][0] == source.convert_tokens_to_ids("<|prompter|>")


def test_hash_differs_between_tokenizers(recipe):
    arguments = recipe(TEXTS)
    tokenizer = load_tokenizer(arguments)
    same = tokenizer_for_rows(tokenizer, arguments.training)
    same.pad_token = "<|end|>"
    assert tokenizer_hash(same) == tokenizer_hash(tokenizer)
    for change in ("chat_template", "eos_token"):
        other = tokenizer_for_rows(tokenizer, arguments.training)
        setattr(other, change, "<|bos|>")
        assert tokenizer_hash(other) != tokenizer_hash(tokenizer), change


def test_preparation_does_not_change_the_arguments(recipe):
    arguments = recipe(TEXTS, shuffle_dataset=True)
    Preparation(arguments, load_tokenizer(arguments))
    prepared(arguments)
    assert (arguments.training.max_length, arguments.training.shuffle_dataset) == (48, True)
