"""An accelerator emulated on the CPU, to find what only a GPU would show: device `npu`, collectives `hccl`.

- The host cannot touch device memory (a segmentation fault), and operations that mix devices are refused.
- Fresh and freed device memory is NaN.
- Queued work (non-blocking copies between pinned memory and the device, waits for events) runs as late as it may, so a missing
  wait shows at every run. The current device is each thread's own and starts at 0.
- Collectives are gloo's on device memory, under NCCL's rules: contiguous tensors on the rank's own device.

Environment: EMU_DEVICES, EMU_DEVICE_MIB, EMU_LAZY=0 (queued work runs at once), EMU_POISON=0 (memory keeps its values), EMU_WATCH
(directory for events, see events.py).

Not emulated: speed, the depth of a compute queue, NCCL's hangs and watchdog, flash attention, Triton, paged memory. bitsandbytes
uses its default kernels. Accelerate adds `cpu:gloo` for offload with nccl and xccl only; the package does it for hccl.
"""
