"""An accelerator emulated on the CPU, to find what only a GPU would show: device `npu`, collectives `hccl`.

- The host cannot touch device memory (a segmentation fault), and operations that mix devices are refused.
- Fresh and freed device memory is NaN.
- Queued work (non-blocking copies between pinned memory and the device, waits for events) runs as late as possible, so a missing
  wait shows in every run. Each thread has its own current device, which is 0 at first.
- Collectives are gloo's, on device memory, with NCCL's rules (rules.h). What breaks a rule is refused with one sentence, on all
  ranks that wait for each other:
  - Tensors are contiguous and on the rank's own device.
  - The first operation of a group is one of all its ranks. A batch of sends and receives among some of them is refused after
    EMU_FIRST_SECONDS (5); a send or a receive without a batch has a communicator of its own.
  - One thread at a time uses a group.
  - All ranks call the same operations in the same order: kind, dtype, number of elements, root and reduction are compared.
  - A receive has the dtype and the size of its send, and is in a batch if the send is.

Environment: EMU_DEVICES, EMU_DEVICE_MIB, EMU_LAZY=0 (queued work runs immediately), EMU_POISON=0 (memory keeps its values),
EMU_WATCH (directory for events, see events.py), EMU_FIRST_SECONDS.

Not emulated: speed, the depth of a compute queue, NCCL's hangs and watchdog, flash attention, Triton, paged memory. bitsandbytes
uses its default kernels. For offload, Accelerate adds `cpu:gloo` to nccl and xccl only; the emulator adds it to hccl.
"""
