# docker build -f docker/cpu.Dockerfile -t verl-like:cpu --build-arg TORCH_INDEX=<index of torch's CPU builds> .
# Without TORCH_INDEX pip takes torch from where it looks anyway: on most machines with gigabytes of CUDA packages.
# docker run --rm --shm-size=2g verl-like:cpu doctor
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY verl_like verl_like
COPY workers workers
COPY trainer trainer
ARG TORCH_INDEX=
RUN (export ${TORCH_INDEX:+PIP_INDEX_URL="$TORCH_INDEX"} && pip install --no-cache-dir "torch==2.13.0") \
    && pip install --no-cache-dir ".[lora,math,tensorboard]"

RUN useradd --create-home --home-dir /workspace user
USER user
WORKDIR /workspace
ENV TOKENIZERS_PARALLELISM=false
ENTRYPOINT ["verl-like"]
