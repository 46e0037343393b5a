# Stairs in a container: `docker build -t stairs .` for a CPU, `--build-arg EXTRA=gpu` for a GPU.
# The model and the K/V of pinned prefixes lie under /home/stairs/.cache: mount a volume there.
FROM python:3.12-slim

ARG EXTRA=cpu
# PyTorch's CPU index, so that pip takes the CPU build and not CUDA's several gigabytes:
# docker build --build-arg PIP_EXTRA_INDEX_URL=... (see pytorch.org, "Get started")
ARG PIP_EXTRA_INDEX_URL
RUN useradd --create-home stairs
WORKDIR /opt/stairs
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# The tested set, but for torch and triton where the GPU extra pins its own pair. A GPU's kernels
# are compiled when they are first needed, so its image keeps a C compiler.
RUN if [ "$EXTRA" = gpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/* \
        && sed -i -e '/^torch==/d' -e '/^triton==/d' constraints.txt; \
    fi \
    && pip install --no-cache-dir --constraint constraints.txt ".[$EXTRA]"

USER stairs
RUN mkdir -p /home/stairs/.cache
VOLUME /home/stairs/.cache
ENV STAIRS_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=120s CMD python -c \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"
# Exec form: SIGTERM reaches the server, which lets running answers end.
STOPSIGNAL SIGTERM
ENTRYPOINT ["stairs", "serve"]
CMD ["smollm2"]
