"""An accelerator emulated on the CPU, to find what only a GPU would show: device `npu`, collectives `hccl`.

- The host cannot touch device memory (a segmentation fault), and operations that mix devices are refused.
- Fresh and freed device memory is NaN.
- Queued work (non-blocking copies between pinned memory and the device, waits for events) runs as late as possible, so a missing
  wait shows in every run. Each thread has its own current device, which is 0 at first.
- Collectives are gloo's, on device memory. As with NCCL, tensors must be contiguous and on the rank's own device.

Environment: EMU_DEVICES, EMU_DEVICE_MIB, EMU_LAZY=0 (queued work runs immediately), EMU_POISON=0 (memory keeps its values),
EMU_WATCH (directory for events, see events.py).

Not emulated: speed, the depth of a compute queue, NCCL's hangs and watchdog, flash attention, Triton, paged memory. bitsandbytes
uses its default kernels. For offload, Accelerate adds `cpu:gloo` to nccl and xccl only; the emulator adds it to hccl.
"""
