# fasttfm as a command, as a user without rights.
#
#   docker build --tag fasttfm .                     PyTorch as the index has it: for NVIDIA GPUs (run with --gpus all)
#   docker build --tag fasttfm:cpu --build-arg TORCH_INDEX=URL .     URL: of PyTorch's wheels for CPUs, a third the size
#   docker run --rm -v "$PWD:/work" fasttfm translate MODEL < in.en > out.de
#
# Neither variant has been built by us yet; scripts/dockerfile.py runs these steps without Docker.
FROM python:3.12-slim

# Triton compiles its launcher, a small C file, when a kernel first runs.
# hadolint ignore=DL3008  # whatever version the base image's Debian has
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=
# hadolint ignore=DL3013  # torch is pinned: the index is taken for a package
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0

COPY . /src
RUN pip install --no-cache-dir --constraint /src/constraints.txt "/src[cpu,plots,tensorboard]" \
    /src/pretraining && rm -rf /src

RUN useradd --create-home --uid 1000 fasttfm
USER 1000
WORKDIR /work
ENTRYPOINT ["fasttfm"]
CMD ["--help"]
