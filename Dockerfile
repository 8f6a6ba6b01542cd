# One file, two images:
#   docker build --tag drafter:cuda .
#   docker build --tag drafter:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# PyPI's torch brings the CUDA libraries with it: the node needs the driver and NVIDIA's container toolkit, no more.
FROM python:3.11-slim-bookworm

ARG TORCH_INDEX=https://pypi.org/simple

# The native decoder is compiled for CPUs; Ray's health checks in Kubernetes use wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential wget \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 ray
USER ray
WORKDIR /home/ray/drafter
ENV PATH=/home/ray/drafter/.venv/bin:$PATH \
    HF_HOME=/home/ray/models \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

# What changes seldom comes first. No build isolation, so that the build tool is locked like everything else.
COPY --chown=ray constraints.txt .
RUN python -m venv .venv \
    && python -m pip install --constraint constraints.txt --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple torch \
    && python -m pip install --constraint constraints.txt setuptools \
    && python -m pip install --constraint constraints.txt --no-build-isolation deepspeed

COPY --chown=ray . .
RUN python -m pip install --constraint constraints.txt --no-build-isolation '.[train]' \
    && mkdir --parents "$HF_HOME"

# Compiles for the processor of the machine that builds: nodes with another one compile at their first start.
RUN python -m drafter.native.build

# Fails here, not on a hundred nodes.
RUN drafter generate --help > /dev/null
