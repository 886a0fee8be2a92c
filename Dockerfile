# An image for nodes with GPUs; docs/slurm.md says how to use it with Slurm, Apptainer and Kubernetes.
#
#   docker build -t hf-fsdp-recipes .                                                       # CUDA
#   docker build -t hf-fsdp-recipes --build-arg BASE=rocm/pytorch:latest --build-arg TORCH= .     # ROCm, the image's torch
#
# PyTorch's CUDA wheels contain CUDA and NCCL; the host needs the driver and the NVIDIA Container Toolkit. This project has never
# built or run the image.
ARG BASE=python:3.12-slim
FROM ${BASE}

# Verbs for NCCL on InfiniBand and RoCE, and a compiler for Triton and torch.compile.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

# Empty: keep the torch of the base image.
ARG TORCH=torch==2.13.0
RUN if [ -n "${TORCH}" ]; then pip install --no-cache-dir "${TORCH}"; fi

WORKDIR /workspace/hf-fsdp-recipes
COPY setup.cfg setup.py MANIFEST.in README.md CHANGELOG.md LICENSE ./
COPY hf_fsdp_recipes hf_fsdp_recipes
COPY accelerate_configs accelerate_configs
COPY recipes recipes
ARG EXTRAS=qlora
RUN pip install --no-cache-dir ".[${EXTRAS}]"

CMD ["hf-fsdp", "--help"]
