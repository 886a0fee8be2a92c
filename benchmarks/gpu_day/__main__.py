"""Starts the steps: python -m benchmarks.gpu_day --out DIRECTORY"""

import os
import sys


def start() -> None:
    """Import everything that the steps need, but start CUDA nowhere.

    So forks of this process can use it.
    """
    # With more, `trl sft` spreads a model over them.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # its import starts CUDA
    from benchmarks.gpu_day.runner import main

    main()


if __name__ == "__main__":
    start()
