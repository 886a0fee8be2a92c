"""Ranks train what one process trains, with every option that a recipe may have."""

from pathlib import Path

import pytest

from tests.oracle.cases import CHOICES, METHODS, OPTIONS, loss_types, parse_case, read_cases
from tests.oracle.driver import Oracle
from tests.oracle.known import surprises

LIST = Path(__file__).with_name("cases.txt")
# Few cases with many options. The slow tests take most options alone.
SELECTION = (
    "llama full template=shard_grad_op accumulate=2 clip=0.5",
    "llama full resume=2 resume_ranks=1 groups=1 decay=0.1",
    "llama full precision=bf16 accumulate=2 checkpointing=1",
    "llama full loss=smooth trainer=plain loader=direct",
    "llama lora_head tie=0 packing=bfd",
    "llama lora_both tie=1 loss=dft template=size_wrap",
    "llama lora average=0 accumulate=2 packing=wrapped template=hybrid_shard_zero2",
    "llama lora resume=1 stream=1 packing=bfd_split",
    "llama qlora_head tie=0",
    "llama lora_score kind=score",
    "gemma2 full completion=1 shuffle=1 padding_free=1 freeze=embeddings",
    "gpt2 full template=hybrid_shard eval=1",
    "qwen3_moe full aux=1 ranks=3 optim=adamw_torch",
    "qwen3_moe lora_experts empty=1",
    "llava full kind=image resume=1",
    "llava lora_head kind=image assistant=1",
    "branching full template=offload",
)
FAULTS = {
    "rate": "llama full fault=rate",
    "head": "llama lora_head tie=0 fault=head",
    "row": "llama lora fault=row",
    "start": "llama full fault=start",
    "state": "llama full resume=1 fault=state",
}
# The fewest cases of a group of cases.txt that must be equal. Of the others, most cannot be made
# small, or fail without FSDP too.
MIN_EQUAL = {
    "causal full": 180,
    "causal lora": 130,
    "causal lora_head": 65,
    "image full": 50,
    "image lora": 50,
    "image lora_head": 48,
    "score": 62,
    "qlora": 32,
    "options": 147,
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return Oracle(tmp_path_factory.mktemp("oracle"))


@pytest.mark.parametrize("case", SELECTION)
def test_ranks_train_what_one_process_trains(case, oracle):
    result = oracle.judge(case)
    assert result["verdict"] == "equal", result


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("row", "start") else ())
        for name in FAULTS
    ],
)
def test_a_fault_of_the_ranks_is_seen(fault, oracle):
    result = oracle.judge(FAULTS[fault])
    assert result["verdict"] == "WRONG", result


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", MIN_EQUAL)
def test_all_families_train_alike_but_for_known_limits(group, oracle):
    lines = [line for line in _lines() if _group(line) == group]
    results = {case: oracle.judge(case) for case in read_cases("\n".join(lines))}
    assert surprises(results) == {}
    num_equal = sum(result["verdict"] == "equal" for result in results.values())
    assert num_equal >= MIN_EQUAL[group], results


def test_every_option_is_tested():
    cases = [parse_case(line) for line in [*_lines(), *SELECTION, *FAULTS.values()]]
    unused = [
        name
        for name, option in OPTIONS.items()
        if all(getattr(case, name) == option.default for case in cases)
    ]
    assert unused == []
    assert {case.method for case in cases} == set(METHODS)
    assert {case.loss for case in cases} == {"", "smooth", *loss_types()}
    for name, values in CHOICES.items():
        used = {getattr(case, name) for case in cases}
        assert set(values) <= used | {OPTIONS[name].default, "sft"}, name


def test_every_case_is_in_a_group():
    assert {_group(line) for line in _lines()} == set(MIN_EQUAL)


def _lines():
    lines = [line.partition("#")[0].strip() for line in LIST.read_text().splitlines()]
    return [line for line in lines if line]


def _group(line):
    case = parse_case(line)
    if not case.family.startswith("all"):
        return "options"
    if case.kind == "score":
        return "score"
    return "qlora" if case.method.startswith("qlora") else f"{case.kind} {case.method}"
