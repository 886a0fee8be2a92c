// The functions of the device that the collectives use.
#pragma once
#include <ATen/ATen.h>
#include <cstdint>
namespace emu {
at::Tensor mem(const at::Tensor& t);          // a CPU tensor over a device tensor's memory
void drain_current(c10::DeviceIndex device);  // runs what is queued on the calling thread's current stream
void note(const char* kind, int64_t bytes, bool pinned, int64_t stream, int device);  // one event for the tests
bool is_device(const at::Tensor& t);
}  // namespace emu
