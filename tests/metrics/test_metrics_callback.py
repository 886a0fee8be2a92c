"""Metrics between two logged steps equal counts by hand: tokens, seconds, memory, utilization."""

from types import SimpleNamespace

import pytest
import torch

from hf_fsdp_recipes.metrics import aggregate, metrics_file
from hf_fsdp_recipes.metrics.clock import MAX_MARKS, PHASES, Clock
from hf_fsdp_recipes.metrics.flops import ModelFlops, TokenCounts, count_tokens
from hf_fsdp_recipes.metrics.memory import DeviceMemory
from hf_fsdp_recipes.metrics.metrics_callback import MetricsCallback


def counted(window=None, **inputs):
    tensors = {key: torch.tensor(value) for key, value in inputs.items()}
    return TokenCounts(*count_tokens(tensors, window).tolist())


IDS = [[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 5]]


def test_padding_is_not_counted():
    mask = [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert counted(input_ids=IDS, attention_mask=mask) == TokenCounts.of([4, 6])
    assert counted(input_ids=IDS, attention_mask=mask, window=5) == TokenCounts(10, 52, 16 + 30)


def test_packed_sequences_are_counted_separately():
    ids = [list(range(7))]
    assert counted(input_ids=ids, cu_seq_lens_q=[0, 3, 7], position_ids=[[0, 1, 2, 0, 1, 2, 3]]) == TokenCounts.of(
        [3, 4]
    )
    assert counted(input_ids=ids, position_ids=[[0, 1, 2, 0, 1, 2, 3]]) == TokenCounts.of([3, 4])


def test_filler_of_a_packed_row_is_not_counted():
    ids = [[5, 6, 7, 5, 6, 0, 0, 0]]
    boundaries, positions = [0, 3, 5, 6, 7, 8], [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert counted(input_ids=ids, cu_seq_lens_q=boundaries) == TokenCounts.of([3, 2])
    assert counted(input_ids=ids, position_ids=positions) == TokenCounts.of([3, 2])


def test_end_of_text_that_is_also_the_pad_token_is_a_token():
    assert counted(input_ids=[[5, 6, 0, 7, 8, 0]], position_ids=[[0, 1, 2, 0, 1, 2]]) == TokenCounts.of([3, 3])


def test_batch_without_mask_or_positions_counts_in_full():
    assert counted(input_ids=IDS) == TokenCounts.of([6, 6])
    assert counted(inputs_embeds=torch.zeros(2, 6, 3).tolist()) == TokenCounts.of([6, 6])
    assert counted(input_ids=IDS, attention_mask=torch.ones(2, 1, 6, 6).tolist()) == TokenCounts.of([6, 6])


@pytest.fixture
def clock(monkeypatch):
    """A running clock, and a function that advances its time."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    running = Clock()
    running.start()
    return running, passes


def test_time_counts_for_the_phase_that_a_mark_ends(clock):
    running, passes = clock
    for seconds, phase in (
        (1, "data"),
        (5, "forward_backward"),
        (2, "optimizer"),
        (1, "data"),
        (4, "forward_backward"),
    ):
        passes(seconds)
        running.mark(phase)
    assert running.pop() == dict.fromkeys(PHASES, 0.0) | {"data": 2.0, "forward_backward": 9.0, "optimizer": 2.0}
    passes(3)
    running.mark("other")
    assert sum(running.pop().values()) == 3.0  # only the time since the last pop


def test_save_during_the_data_phase_is_counted_apart_even_if_it_fails(clock):
    running, passes = clock
    passes(1)
    with pytest.raises(OSError), running.spending("save", after="data"):
        passes(7)
        raise OSError
    passes(2)
    running.mark("data")
    popped = running.pop()
    assert (popped["data"], popped["save"]) == (3.0, 7.0)


def test_clock_that_was_not_started_records_nothing():
    idle = Clock()
    for _ in range(3):
        idle.mark("data")
    assert sum(idle.pop().values()) == 0.0 and not idle._marks


def test_run_that_never_logs_does_not_accumulate_marks(clock):
    running, passes = clock
    for _ in range(3 * MAX_MARKS):
        passes(1)
        running.mark("data")
    assert len(running._marks) <= MAX_MARKS
    assert running.pop()["data"] == 3 * MAX_MARKS


class Device:
    """A fake accelerator module with scripted time and memory."""

    def __init__(self):
        self.seconds, self.waited, self.allocated, self.peak, self.resets = 0.0, 0, 0, 0, 0
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.seconds

            def synchronize(self):
                device.waited += 1

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3  # milliseconds, as in torch

        self.Event = Event

    def memory_allocated(self):
        return self.allocated

    def max_memory_allocated(self):
        return self.peak

    def max_memory_reserved(self):
        return self.peak + 5

    def reset_peak_memory_stats(self):
        self.resets += 1


def test_on_a_device_phases_are_timed_by_events_with_one_synchronization():
    device, running = Device(), Clock()
    running.start(device)
    for seconds, phase in ((0.25, "data"), (1.5, "forward_backward"), (0.5, "optimizer")):
        device.seconds += seconds
        running.mark(phase)
    assert device.waited == 0
    assert running.pop() == dict.fromkeys(PHASES, 0.0) | {"data": 0.25, "forward_backward": 1.5, "optimizer": 0.5}
    assert device.waited == 1


def test_valley_and_peak_are_reset_together():
    device = Device()
    memory = DeviceMemory(device)
    for allocated in (30, 10, 20):
        device.allocated = allocated
        memory.sample_valley()
    device.peak = 90
    assert memory.pop() == (20, 10, 90, 95)
    assert device.resets == 1
    assert memory.pop()[1] == 20  # without a step, the valley is the memory allocated now


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_parameters_of_4bit_layers_are_counted_unpacked(storage):
    from bitsandbytes.nn import Linear4bit, Params4bit

    model = torch.nn.Sequential(Linear4bit(64, 32), torch.nn.Linear(32, 3))
    packed = torch.empty((64 * 32 // 2 // storage.itemsize, 1), dtype=storage, device="meta")
    model[0].weight = Params4bit(packed, requires_grad=False, quant_storage=storage, bnb_quantized=True)
    callback = MetricsCallback()
    callback.on_init_end(None, None, None, model=model)
    assert callback._num_parameters == 64 * 32 + 32 + 32 * 3 + 3


def test_memory_of_cpu_ranks_and_of_devices_without_counters_is_zero():
    for device in (None, SimpleNamespace()):
        memory = DeviceMemory(device)
        memory.sample_valley()
        assert memory.pop() == (0, 0, 0, 0)


def test_summary_equals_the_metrics_by_hand():
    flops = ModelFlops(100, 100, 20, attention_width=6, window_width=0, window=None)
    seconds = dict.fromkeys(PHASES, 0.0) | {"forward_backward": 3.0, "data": 1.0, "save": 5.0, "evaluation": 7.0}
    works = (TokenCounts.of([10, 5]), TokenCounts.of([9]))
    rows = [
        aggregate.pack(
            torch.tensor([work.tokens, work.pairs, work.window_pairs]),
            (host, 1, 2, 3, 4),
            seconds,
        ).tolist()
        for host, work in zip((70, 80), works, strict=True)
    ]
    entry = aggregate.summarize(rows, 2, aggregate.MfuInputs(flops, peak_flops=1e4, is_recomputed=True))
    assert entry["tokens"] == 24 and entry["host_bytes"] == [70, 80] and entry["device_reserved_peak_bytes"] == [4, 4]
    assert entry["step_seconds"] == 2.0  # 4 s of training, without saving and evaluation
    assert entry["seconds"]["save"] == 5.0
    assert (entry["tokens_per_second"], entry["tokens_per_second_per_device"]) == (6.0, 3.0)
    model = 600 * 24 + 3 * 2 * 6 * (100 + 25 + 81)
    assert entry["mfu"] == pytest.approx(model / (4.0 * 2 * 1e4))
    recomputed = 200 * 24 + 2 * 6 * 206 - 2 * 20 * 24
    assert entry["hfu"] == pytest.approx((model + recomputed) / (4.0 * 2 * 1e4))


def test_unknown_peak_means_no_mfu():
    seconds = dict.fromkeys(PHASES, 1.0)
    row = aggregate.pack(torch.tensor([5, 25, 25]), (0, 0, 0, 0, 0), seconds).tolist()
    flops = ModelFlops(100, 100, 20, 6, 0, None)
    without_peak = aggregate.summarize([row], 1, aggregate.MfuInputs(flops, None))
    assert "mfu" not in without_peak and without_peak["model_flops_per_second_per_device"] > 0
    assert "model_flops_per_second_per_device" not in aggregate.summarize([row], 1, aggregate.MfuInputs(None, 1e12))


def test_averages_exclude_the_warm_up_and_are_weighted_by_time():
    slow = {"tokens_per_second": 1.0, "step_seconds": 50.0, "num_steps": 3, "is_warmup": True}
    entries = [
        slow,
        {"tokens_per_second": 100.0, "step_seconds": 1.0, "num_steps": 1, "mfu": 0.5},
        {"tokens_per_second": 40.0, "step_seconds": 1.0, "num_steps": 2, "mfu": 0.2},
    ]
    assert aggregate.average(entries) == pytest.approx({"tokens_per_second": 60.0, "mfu": 0.3})
    assert aggregate.average([slow]) == {}


def test_resumed_file_keeps_earlier_steps_and_drops_only_the_incomplete_line(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    metrics_file.begin(path, 0, [{"run": "a", "from_step": 0}])
    for step in (1, 2, 3):
        metrics_file.append(path, {"step": step, "loss": float(step)})
    with path.open("a") as stream:
        stream.write('{"step": 4, "lo')
    metrics_file.begin(path, 2, [{"run": "a", "from_step": 2}])
    metrics_file.append(path, {"step": 3, "loss": 30.0})
    entries = metrics_file.read_metrics(path)
    assert [entry.get("step", entry.get("run")) for entry in entries] == ["a", 1, 2, "a", 3]
    assert list(path.parent.iterdir()) == [path]
    metrics_file.begin(path, 0, [])
    assert metrics_file.read_metrics(path) == []  # a run from step 0 starts a new file
