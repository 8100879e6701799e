# One image for every role: `docker build --target cpu -t slipstream:cpu .`
#   core  reward, buffer and tools; no torch
#   cpu   every role, torch for CPUs
#   gpu   every role, torch for CUDA and vLLM (unverified: never built where this was written)
# Nothing here needs BuildKit. A change of code rebuilds from `wheel` on, in seconds: what is installed lies in layers
# that depend on pyproject.toml and constraints.txt alone. The classic builder builds the stages from the top, so
# targets stand in the order of their size.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/slipstream/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
# tini passes signals on and reaps what user code leaves behind; bubblewrap holds programs of the `python` reward
# where the container may use namespaces; the folders are where volumes go, owned by the user.
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini bubblewrap \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 slipstream \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin slipstream \
 && mkdir -p /runs /cache /run/slipstream /etc/slipstream \
 && chown 10001:10001 /runs /cache /run/slipstream

FROM base AS deps-core
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/slipstream && python3 -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir hatchling
WORKDIR /src
COPY pyproject.toml constraints.txt docker/requirements.py ./
RUN /opt/slipstream/bin/python requirements.py core > core.txt \
 && /opt/slipstream/bin/pip install --no-cache-dir --constraint constraints.txt --requirement core.txt

FROM deps-core AS wheel
COPY README.md LICENSE CHANGELOG.md ./
COPY configs ./configs
COPY common ./common
COPY services ./services
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist .

FROM base AS runtime
ENV HOME=/tmp \
    SLIPSTREAM_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    OMP_NUM_THREADS=1 \
    TOKENIZERS_PARALLELISM=false
WORKDIR /
ENTRYPOINT ["tini", "--", "slipstream"]
CMD ["--help"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
  CMD ["python", "-m", "slipstream.telemetry.probe"]
LABEL org.opencontainers.image.title="slipstream" \
      org.opencontainers.image.description="Asynchronous RL post-training of language models" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM runtime AS core
COPY --from=deps-core /opt/slipstream /opt/slipstream
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-deps --no-index /dist/*.whl
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
USER 10001:10001

FROM deps-core AS deps-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/slipstream/bin/pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} torch
RUN /opt/slipstream/bin/python requirements.py train reasoning-gym datasets lora > train.txt \
 && /opt/slipstream/bin/pip install --no-cache-dir --constraint constraints.txt --requirement train.txt

FROM runtime AS cpu
COPY --from=deps-cpu /opt/slipstream /opt/slipstream
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-deps --no-index /dist/*.whl
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
USER 10001:10001

FROM deps-core AS deps-gpu
# vLLM pins torch and transformers to its own; what else is pinned stays so.
RUN grep --invert-match --extended-regexp '^(torch|transformers|tokenizers|numpy|huggingface_hub)==' constraints.txt > gpu.txt \
 && /opt/slipstream/bin/python requirements.py train reasoning-gym datasets lora vllm > train.txt \
 && /opt/slipstream/bin/pip install --no-cache-dir --constraint gpu.txt --requirement core.txt --requirement train.txt

FROM runtime AS gpu
# Triton compiles its launchers when a kernel is first used.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=deps-gpu /opt/slipstream /opt/slipstream
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-deps --no-index /dist/*.whl
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
USER 10001:10001
