"""An accelerator emulated on the CPU, to find what only a GPU would show.

The device is `npu`, and its collectives are `hccl`.

- The host cannot touch device memory (a segmentation fault), and operations that mix devices are
  refused.
- Fresh and freed device memory is NaN.
- Queued work (non-blocking copies between pinned memory and the device, waits for events) runs as
  late as possible, so a missing wait shows in every run. Each thread has its own current device,
  which is 0 at first.
- Collectives are gloo's, on device memory, with the rules of torch's NCCL backend (rules.h). A call
  that breaks a rule raises one sentence, on all ranks that wait for each other:
  - Tensors are contiguous and on the rank's own device.
  - The first operation of a group is one in which all its ranks take part, the same kind on each. A
    batch of sends and receives among some of them is refused after EMU_FIRST_SECONDS (30). As
    without `device_id` in torch, a send or a receive outside of a batch has a communicator of its
    own.
  - One thread at a time uses a group, until its work is done. NCCL itself only forbids calls at the
    same time.
  - All ranks call the same operations in the same order: kind, dtype, number of elements, root and
    reduction are compared.
  - A receive has the dtype and the size of its send, and is in a batch if the send is.

Environment: EMU_DEVICES, EMU_DEVICE_MIB, EMU_LAZY=0 (queued work runs immediately), EMU_POISON=0
(memory keeps its values), EMU_WATCH (directory for events, see events.py), EMU_FIRST_SECONDS.

Not emulated: speed, the depth of a compute queue, NCCL's hangs and watchdog, flash attention,
Triton, paged memory. bitsandbytes uses its default kernels. For offload, Accelerate adds `cpu:gloo`
to nccl and xccl only; the emulator adds it to hccl.
"""
