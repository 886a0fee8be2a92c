"""The module `torch.npu`: those functions of `torch.cuda` that our upstream packages call.

These are Accelerate, transformers and TRL.
"""

import os
import types
from typing import Any

import torch

from torch_npu import _C

Device = torch.device | int | str | None
DEVICE_TYPE = 20  # value of PrivateUse1 in c10::DeviceType
DEFAULT_MIB = 8192

npu = types.ModuleType("torch.npu")
random = types.ModuleType("torch.npu.random")
amp = types.ModuleType("torch.npu.amp")


def index_of(device: Device = None) -> int:
    """Return a device's index; None and a bare `npu` mean the thread's current device."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return torch._C._accelerator_getDeviceIndex() if index is None or index < 0 else index


class Stream(torch.Stream):
    """A stream of the device, with the constructor of `torch.cuda.Stream`."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> "Stream":
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("npu", index_of(device)), priority=priority)

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)


class Event:
    """Makes a plain `torch.Event`, because `torch.Event.elapsed_time` accepts no subclass."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        return torch.Event(
            "npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


class DeviceContext:
    """Makes a device the thread's current one inside `with`."""

    def __init__(self, device: Device) -> None:
        self._index = index_of(device)

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_exchangeDevice(self._index)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_setDeviceIndex(self._before)


class StreamContext:
    """Makes a stream the current one inside `with`; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._device = torch._C._accelerator_getDeviceIndex()
            self._before = torch.accelerator.current_stream(self._stream.device)
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._before)
            torch._C._accelerator_setDeviceIndex(self._device)


class Properties:
    """What `get_device_properties` returns."""

    name = "Emulated"
    total_memory = int(os.environ.get("EMU_DEVICE_MIB", DEFAULT_MIB)) << 20
    major = minor = 0
    multi_processor_count = 1


def get_rng_state(device: Device = "npu") -> torch.Tensor:
    return _C.default_generator(index_of(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = "npu") -> None:
    _C.default_generator(index_of(device)).set_state(new_state.cpu())


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(number) for number in range(_C.device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for number, state in enumerate(new_states):
        set_rng_state(state, number)


def manual_seed(seed: int) -> None:
    _C.default_generator(index_of()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for number in range(_C.device_count()):
        _C.default_generator(number).manual_seed(int(seed))


RANDOM = {
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "set_rng_state_all": set_rng_state_all,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed_all,
}


def _reset_peak(device: Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(index_of(device))


def _memory(name: str) -> Any:
    return lambda device=None: torch.accelerator.memory_stats(index_of(device)).get(name, 0)


def fill() -> None:
    """Give `torch.npu` its functions; requires that the device is registered."""
    devices = {
        "is_available": lambda: _C.device_count() > 0,
        "device_count": _C.device_count,
        "current_device": index_of,
        "set_device": lambda device: torch._C._accelerator_setDeviceIndex(index_of(device)),
        "device": DeviceContext,
        "synchronize": lambda device=None: torch.accelerator.synchronize(index_of(device)),
        "get_device_name": lambda device=None: Properties.name,
        "get_device_properties": lambda device=None: Properties(),
        "get_device_capability": lambda device=None: (0, 0),
        "can_device_access_peer": lambda *_: True,
        "is_bf16_supported": lambda *_: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    life = {
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "is_in_bad_fork": lambda: False,
        "ipc_collect": lambda: None,
    }
    streams = {
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(index_of(device)),
        "default_stream": lambda device=None: Stream(
            stream_id=0, device_index=index_of(device), device_type=DEVICE_TYPE
        ),
    }
    memory = {
        "empty_cache": torch.accelerator.empty_cache,
        "memory_stats": lambda device=None: torch.accelerator.memory_stats(index_of(device)),
        "memory_allocated": _memory("allocated_bytes.all.current"),
        "max_memory_allocated": _memory("allocated_bytes.all.peak"),
        "memory_reserved": _memory("reserved_bytes.all.current"),
        "max_memory_reserved": _memory("reserved_bytes.all.peak"),
        "reset_peak_memory_stats": _reset_peak,
        "reset_max_memory_allocated": _reset_peak,
        "mem_get_info": lambda device=None: _C.memory_info(index_of(device)),
    }
    seeds = {
        "seed": lambda: None,
        "seed_all": lambda: None,
        "initial_seed": lambda: _C.default_generator(index_of()).initial_seed(),
        "default_generators": tuple(
            _C.default_generator(number) for number in range(_C.device_count())
        ),
    }
    vars(npu).update(devices | life | streams | memory | seeds | RANDOM, random=random, amp=amp)
    vars(random).update(RANDOM)
    amp.GradScaler = torch.amp.GradScaler
    amp.autocast = torch.amp.autocast
