"""Requests to the device in load, training, save and export: which code copies and which waits."""

from collections import Counter

from safetensors.torch import load_file

from tests.device.emulator.events import TO_DEVICE, TO_HOST, WAITS, total_bytes

NUM_RANKS, NUM_SAVES = 2, 3


def asked_in(events, *packages):
    return [
        event
        for event in events
        if any(f".{name}" in frame for frame in event.project for name in packages)
    ]


def exported_bytes(run):
    weights = load_file(run.output / "export" / "model.safetensors")
    return sum(weight.nbytes for weight in weights.values())


def test_a_save_copies_the_state_once(runs):
    run = runs.get("full")
    num_weights = len(load_file(run.output / "export" / "model.safetensors"))
    # The weights, and two moments and a step for each.
    state_bytes = 3 * exported_bytes(run) + 4 * NUM_RANKS * num_weights
    saving = [
        event
        for event in asked_in(run.events, "run:_save_checkpoint", "saver:")
        if event.kind in TO_HOST
    ]
    copied = [event for event in saving if any("host_copy:" in frame for frame in event.project)]
    assert total_bytes(copied) == NUM_SAVES * state_bytes
    assert [event.asked_by for event in saving if event not in copied and event.num_bytes > 8] == []


def test_no_rank_uses_the_device_of_another(runs):
    events = runs.get("full").events
    used = {(event.rank, event.device) for event in events if event.device >= 0}
    assert used == {(0, 0), (1, 1)}


def test_loading_sends_each_weight_to_a_device_once(runs):
    for name, copies in (("full", 1), ("direct", 1)):
        run = runs.get(name)
        loading = [event for event in asked_in(run.events, "loading") if event.kind in TO_DEVICE]
        assert total_bytes(loading) < copies * exported_bytes(run) + 1000  # buffers
        if name == "full":
            # Rank 0 reads and sends.
            assert {event.rank for event in loading if event.num_bytes > 100} == {0}


def test_an_export_copies_each_weight_to_the_host_once(runs):
    run = runs.get("full")
    copied = [event for event in asked_in(run.events, "export") if event.kind in TO_HOST]
    assert total_bytes(copied) == exported_bytes(run)


def test_a_step_waits_for_the_device_no_more_than_stock(runs):
    def waits(name):
        run = runs.get(name)
        found = Counter(
            (event.rank, event.kind)
            for event in run.events
            if event.kind in WAITS and any(":training_step:" in frame for frame in event.upstream)
        )
        return {key: count / len(run.losses) for key, count in found.items()}

    assert waits("full") == waits("stock")
