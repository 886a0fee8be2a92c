// The functions of the device that the collectives use.
#pragma once
#include <ATen/ATen.h>
#include <cstdint>
namespace emu {
// Returns a CPU tensor over a device tensor's memory.
at::Tensor mem(const at::Tensor& t);
// Runs what is queued on the calling thread's current stream.
void drain_current(c10::DeviceIndex device);
// Records one event for the tests.
void note(const char* kind, int64_t bytes, bool pinned, int64_t stream, int device);
bool is_device(const at::Tensor& t);
}  // namespace emu
