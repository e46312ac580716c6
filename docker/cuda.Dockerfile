# docker build -f docker/cuda.Dockerfile -t verl-like:cuda .
# docker run --rm --gpus all --shm-size=16g verl-like:cuda doctor
FROM nvidia/cuda:13.0.3-cudnn-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv python3-dev git \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY verl_like verl_like
COPY workers workers
COPY trainer trainer
# vLLM brings the torch that it was built with; flash-attn is compiled against that
ARG FLASH_ATTN=0
RUN pip install --no-cache-dir ".[vllm,lora,math,tensorboard,trackio,wandb]" "ray[default]" \
    && if [ "$FLASH_ATTN" = 1 ]; then pip install --no-cache-dir --no-build-isolation ".[flash-attn]"; fi

RUN useradd --create-home --home-dir /workspace user
USER user
WORKDIR /workspace
ENV TOKENIZERS_PARALLELISM=false
ENTRYPOINT ["verl-like"]
