"""Peak FLOP/s of devices, dense (no structured sparsity), per dtype, from the vendors' own documents.

Only a name that matches a row whole has a peak: a MIG slice, a laptop's GPU or a device that is not here has none,
and no utilisation is told rather than a wrong one. Tensor-core figures are those with fp32 accumulation, which is
what PyTorch asks for. A card that clocks above what its vendor rates it at can exceed its peak by some percent.
"""

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peak:
    """A device's dense peaks in TFLOP/s.

    Attributes:
        names: regular expression for the whole device name in lower case, vendor and series left out.
        source: the vendor's document.
        bfloat16, float16, tf32, float32: None where the device has no such matrix product.
    """

    names: str
    source: str
    bfloat16: float | None
    float16: float | None
    tf32: float | None
    float32: float | None


PEAKS = (
    Peak(r"gb300", "NVIDIA GB300 NVL72 specifications, a GPU, halved for sparsity", 2500, 2500, 1250, 80),
    Peak(r"gb200", "NVIDIA GB200 NVL72 datasheet, a GPU, halved for sparsity", 2500, 2500, 1250, 80),
    Peak(
        r"b300( sxm6 ac)?", "NVIDIA HGX B300 specifications, a GPU of eight, halved for sparsity", 2250, 2250, 1125, 75
    ),
    Peak(r"b200", "NVIDIA HGX B200 specifications, a GPU of eight, halved for sparsity", 2250, 2250, 1125, 75),
    Peak(r"gh200( \d+gb| 144g hbm3e)?", "NVIDIA GH200 datasheet, dense as printed there", 989.4, 989.4, 494.7, 67),
    Peak(r"h200( \d+gb hbm3e)?", "NVIDIA H200 datasheet, SXM, halved for sparsity", 989.4, 989.4, 494.7, 67),
    Peak(r"h200 nvl", "NVIDIA H200 datasheet, NVL, halved for sparsity", 835.5, 835.5, 417.5, 60),
    Peak(r"h100 (sxm5?|\d+gb hbm3)", "NVIDIA H100 architecture white paper, SXM5", 989.4, 989.4, 494.7, 66.9),
    Peak(r"h100 pcie", "NVIDIA H100 architecture white paper, PCIe", 756, 756, 378, 51.2),
    Peak(r"h100 nvl", "NVIDIA H100 datasheet, NVL, halved for sparsity", 835.5, 835.5, 417.5, 60),
    Peak(r"a[18]00([- ](sxm4?|pcie|[48]0gb))*", "NVIDIA A100 datasheet; A800 the same", 312, 312, 156, 19.5),
    Peak(r"a30( \d+gb)?", "NVIDIA A30 datasheet", 165, 165, 82, 10.3),
    Peak(r"a40", "NVIDIA A40 datasheet", 149.7, 149.7, 74.8, 37.4),
    Peak(r"a10", "NVIDIA A10 datasheet", 125, 125, 62.5, 31.2),
    Peak(r"a10g", "NVIDIA A10G datasheet of AWS G5", 70, 70, 35, 35),
    Peak(r"l4", "NVIDIA L4 datasheet, halved for sparsity", 121, 121, 60, 30.3),
    Peak(r"l40", "NVIDIA L40 datasheet", 181.05, 181.05, 90.5, 90.5),
    Peak(r"l40s", "NVIDIA L40S datasheet", 362.05, 362.05, 183, 91.6),
    Peak(r"v100-(sxm2|sxm3)-\d+gb", "NVIDIA V100 datasheet, SXM2", None, 125, None, 15.7),
    Peak(r"v100-pcie-\d+gb", "NVIDIA V100 datasheet, PCIe", None, 112, None, 14),
    Peak(r"v100s-pcie-\d+gb", "NVIDIA V100 datasheet, V100S PCIe", None, 130, None, 16.4),
    Peak(r"t4", "NVIDIA T4 datasheet", None, 65, None, 8.1),
    Peak(r"rtx 3090", "NVIDIA Ampere GA102 white paper", 71, 71, 35.6, 35.6),
    Peak(r"rtx 3090 ti", "NVIDIA Ampere GA102 white paper, appendix", 80, 80, 40, 40),
    Peak(r"rtx 4090", "NVIDIA Ada white paper", 165.2, 165.2, 82.6, 82.6),
    Peak(r"rtx 4080", "NVIDIA Ada white paper", 97.5, 97.5, 48.7, 48.7),
    Peak(r"rtx 5080", "NVIDIA RTX Blackwell white paper", 112.6, 112.6, 56.3, 56.3),
    Peak(r"rtx 5090", "NVIDIA RTX Blackwell white paper", 209.5, 209.5, 104.8, 104.8),
    Peak(r"rtx a6000", "NVIDIA Ampere GA102 white paper", 154.8, 154.8, 77.4, 38.7),
    Peak(r"rtx a5000", "NVIDIA RTX A5000 datasheet, halved for sparsity", 111.1, 111.1, 55.6, 27.8),
    Peak(r"rtx a4000", "NVIDIA RTX A4000 datasheet, halved for sparsity", 76.7, 76.7, 38.3, 19.2),
    Peak(
        r"rtx pro 6000 blackwell workstation edition",
        "NVIDIA RTX Blackwell PRO white paper",
        503.8,
        503.8,
        251.9,
        125.9,
    ),
    Peak(r"rtx 6000 ada( generation)?", "NVIDIA Ada white paper for professionals", 364.2, 364.2, 182.1, 91.1),
    Peak(r"mi210", "AMD Instinct MI210 datasheet, matrix", 181, 181, None, 45.3),
    # One device of PyTorch is one of the package's two dies.
    Peak(r"mi250", "AMD Instinct MI250 datasheet, matrix, half the package", 181.05, 181.05, None, 45.3),
    Peak(r"mi250x", "AMD Instinct MI250X datasheet, matrix, half the package", 191.5, 191.5, None, 47.85),
    Peak(r"mi300a", "AMD Instinct MI300A datasheet, matrix", 980.6, 980.6, 490.3, 122.6),
    Peak(r"mi300x( (vf|oam))?", "AMD Instinct MI300X datasheet, matrix", 1307.4, 1307.4, 653.7, 163.4),
    Peak(r"mi325x( vf)?", "AMD Instinct MI325X datasheet, matrix", 1307.4, 1307.4, 653.7, 163.4),
    Peak(r"mi350x( vf)?", "AMD Instinct MI350X brochure, matrix", 2309.6, 2309.6, None, 144.2),
    Peak(r"mi355x( vf)?", "AMD CDNA 4 white paper, MI355X, matrix", 2516.6, 2516.6, None, 157.3),
    Peak(r"gaudi ?2", "Intel at Hot Chips 2024, Gaudi 2 beside Gaudi 3", 432, None, None, None),
    Peak(r"gaudi ?3", "Intel at Hot Chips 2024, Gaudi 3", 1835, None, None, None),
)
VENDOR_AND_SERIES = re.compile(r"\b(nvidia|amd|intel|tesla|geforce|instinct)\b|\((r|tm)\)")


def find_peak(device_name: str) -> Peak | None:
    """Return the row of a device as PyTorch names it, or None where there is none."""
    name = " ".join(VENDOR_AND_SERIES.sub("", device_name.lower()).split())
    return next((peak for peak in PEAKS if re.fullmatch(peak.names, name)), None)


def find_peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak in FLOP/s for bfloat16, float16, tf32 or float32, or None where it is not known."""
    peak = find_peak(device_name)
    tflops = getattr(peak, dtype, None) if peak else None
    return tflops * 1e12 if tflops else None


def matmul_dtype(mixed_precision: str, model: torch.nn.Module) -> str:
    """Return what a run's matrix products compute in: bfloat16, float16, tf32, float32, or what else it says.

    Args:
        mixed_precision: Accelerate's: no, bf16, fp16 or fp8.
        model: asked where it is "no"; the dtype of most of its parameters.
    """
    if mixed_precision != "no":
        return {"bf16": "bfloat16", "fp16": "float16"}.get(mixed_precision, mixed_precision)
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    dtype = max(sizes, key=lambda key: sizes[key], default=torch.float32)
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return str(dtype).removeprefix("torch.")
