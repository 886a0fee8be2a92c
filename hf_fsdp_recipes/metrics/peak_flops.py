"""Lists the peak FLOP/s of devices for each dtype: dense (without structured sparsity), from the vendors' documents.

A device must match by its full name, because a missing MFU is better than a wrong one; MIG slices and laptop GPUs do not
match. Tensor-core figures assume fp32 accumulation, as in PyTorch. A card that clocks higher than its rating can exceed
its listed peak by a few percent.
"""

import re
from collections import Counter

import torch

from hf_fsdp_recipes.precision import format_dtype

DTYPES = ("bfloat16", "float16", "tf32", "float32")
# The key is a regular expression for a device's full name in lower case, without vendor and series. The values are TFLOP/s for
# each of DTYPES, or None if the vendor gives no figure. The comment names the vendor's document;
# "halved for sparsity" means that the document gives figures for sparse matrices.
# fmt: off
PEAKS: dict[str, tuple[float | None, ...]] = {
    r"gb300": (2500, 2500, 1250, 80),  # NVIDIA GB300 NVL72 specifications, per GPU, halved for sparsity
    r"gb200": (2500, 2500, 1250, 80),  # NVIDIA GB200 NVL72 datasheet, per GPU, halved for sparsity
    r"b300( sxm6 ac)?": (2250, 2250, 1125, 75),  # NVIDIA HGX B300 specifications, one of 8 GPUs, halved for sparsity
    r"b200": (2250, 2250, 1125, 75),  # NVIDIA HGX B200 specifications, one of 8 GPUs, halved for sparsity
    r"gh200( \d+gb| 144g hbm3e)?": (989.4, 989.4, 494.7, 67),  # NVIDIA GH200 datasheet, which gives dense figures
    r"h200( \d+gb hbm3e)?": (989.4, 989.4, 494.7, 67),  # NVIDIA H200 datasheet, SXM, halved for sparsity
    r"h200 nvl": (835.5, 835.5, 417.5, 60),  # NVIDIA H200 datasheet, NVL, halved for sparsity
    r"h100 (sxm5?|\d+gb hbm3)": (989.4, 989.4, 494.7, 66.9),  # NVIDIA H100 architecture white paper, SXM5
    r"h100 pcie": (756, 756, 378, 51.2),  # NVIDIA H100 architecture white paper, PCIe
    r"h100 nvl": (835.5, 835.5, 417.5, 60),  # NVIDIA H100 datasheet, NVL, halved for sparsity
    r"a[18]00([- ](sxm4?|pcie|[48]0gb))*": (312, 312, 156, 19.5),  # NVIDIA A100 datasheet, also used for A800
    r"a30( \d+gb)?": (165, 165, 82, 10.3),  # NVIDIA A30 datasheet
    r"a40": (149.7, 149.7, 74.8, 37.4),  # NVIDIA A40 datasheet
    r"a10": (125, 125, 62.5, 31.2),  # NVIDIA A10 datasheet
    r"a10g": (70, 70, 35, 35),  # NVIDIA A10G datasheet of AWS G5
    r"l4": (121, 121, 60, 30.3),  # NVIDIA L4 datasheet, halved for sparsity
    r"l40": (181.05, 181.05, 90.5, 90.5),  # NVIDIA L40 datasheet
    r"l40s": (362.05, 362.05, 183, 91.6),  # NVIDIA L40S datasheet
    r"v100-(sxm2|sxm3)-\d+gb": (None, 125, None, 15.7),  # NVIDIA V100 datasheet, SXM2
    r"v100-pcie-\d+gb": (None, 112, None, 14),  # NVIDIA V100 datasheet, PCIe
    r"v100s-pcie-\d+gb": (None, 130, None, 16.4),  # NVIDIA V100 datasheet, V100S PCIe
    r"t4": (None, 65, None, 8.1),  # NVIDIA T4 datasheet
    r"rtx 3090": (71, 71, 35.6, 35.6),  # NVIDIA Ampere GA102 white paper
    r"rtx 3090 ti": (80, 80, 40, 40),  # NVIDIA Ampere GA102 white paper, appendix
    r"rtx 4090": (165.2, 165.2, 82.6, 82.6),  # NVIDIA Ada white paper
    r"rtx 4080": (97.5, 97.5, 48.7, 48.7),  # NVIDIA Ada white paper
    r"rtx 5080": (112.6, 112.6, 56.3, 56.3),  # NVIDIA RTX Blackwell white paper
    r"rtx 5090": (209.5, 209.5, 104.8, 104.8),  # NVIDIA RTX Blackwell white paper
    r"rtx a6000": (154.8, 154.8, 77.4, 38.7),  # NVIDIA Ampere GA102 white paper
    r"rtx a5000": (111.1, 111.1, 55.6, 27.8),  # NVIDIA RTX A5000 datasheet, halved for sparsity
    r"rtx a4000": (76.7, 76.7, 38.3, 19.2),  # NVIDIA RTX A4000 datasheet, halved for sparsity
    r"rtx pro 6000 blackwell workstation edition": (503.8, 503.8, 251.9, 125.9),  # NVIDIA RTX Blackwell PRO white paper
    r"rtx 6000 ada( generation)?": (364.2, 364.2, 182.1, 91.1),  # NVIDIA Ada white paper, professional cards
    r"mi210": (181, 181, None, 45.3),  # AMD Instinct MI210 datasheet, matrix
    r"mi250": (181.05, 181.05, None, 45.3),  # AMD Instinct MI250 datasheet, matrix, halved: one card is two PyTorch devices
    r"mi250x": (191.5, 191.5, None, 47.85),  # AMD Instinct MI250X datasheet, matrix, halved: one card is two PyTorch devices
    r"mi300a": (980.6, 980.6, 490.3, 122.6),  # AMD Instinct MI300A datasheet, matrix
    r"mi300x( (vf|oam))?": (1307.4, 1307.4, 653.7, 163.4),  # AMD Instinct MI300X datasheet, matrix
    r"mi325x( vf)?": (1307.4, 1307.4, 653.7, 163.4),  # AMD Instinct MI325X datasheet, matrix
    r"mi350x( vf)?": (2309.6, 2309.6, None, 144.2),  # AMD Instinct MI350X brochure, matrix
    r"mi355x( vf)?": (2516.6, 2516.6, None, 157.3),  # AMD CDNA 4 white paper, MI355X, matrix
    r"gaudi ?2": (432, None, None, None),  # Intel at Hot Chips 2024, Gaudi 2 compared with Gaudi 3
    r"gaudi ?3": (1835, None, None, None),  # Intel at Hot Chips 2024, Gaudi 3
}
# fmt: on
VENDOR_AND_SERIES = re.compile(r"\b(nvidia|amd|intel|tesla|geforce|instinct)\b|\((r|tm)\)")


def find_peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak in FLOP/s of a device, named as in `torch.cuda.get_device_name`, or None if it is not known."""
    name = " ".join(VENDOR_AND_SERIES.sub("", device_name.lower()).split())
    for names, tflops in PEAKS.items():
        if re.fullmatch(names, name):
            peak = dict(zip(DTYPES, tflops, strict=True)).get(dtype)
            return peak * 1e12 if peak else None
    return None


def matmul_dtype(mixed_precision: str, model: torch.nn.Module) -> str:
    """Return the dtype of a run's matrix products: bfloat16, float16, tf32, float32, or another such as fp8.

    Without mixed precision ("no"), return the dtype of most of the model's parameters, or tf32 if that dtype is float32 and
    torch may use TF32.
    """
    if mixed_precision != "no":
        return {"bf16": "bfloat16", "fp16": "float16"}.get(mixed_precision, mixed_precision)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    dtype = sizes.most_common(1)[0][0] if sizes else torch.float32
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return format_dtype(dtype)
