# syntax=docker/dockerfile:1
# One image for all services: `docker run fedstream:0.1.0 coordinator`, and so on.
#   docker build -t fedstream:0.1.0 .
#   docker build -t fedstream:0.1.0-cuda --build-arg TORCH=cuda .
# Every package is pinned by constraints.txt. The base is pinned by its tag; for a build that is the same in a year give
# its digest too: --build-arg PYTHON=3.11.14-slim-bookworm@sha256:...
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG TORCH=cpu
# Where PyTorch's CPU builds are. The package index that pip uses otherwise has the one for CUDA, of several gigabytes.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG SETUPTOOLS=84.2.1
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/fedstream
ENV PATH=/opt/fedstream/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# torch first and alone, from its own index: nothing else is taken from there, nor by its dependencies.
RUN case "$TORCH" in \
      cpu) grep -E '^torch(vision)?==' constraints.txt > torch.txt; \
           pip install --no-deps --index-url "$TORCH_CPU_INDEX" --requirement torch.txt ;; \
      cuda) ;; \
      *) echo "TORCH=$TORCH: cpu or cuda" >&2; exit 2 ;; \
    esac
# What we depend on changes less often than we do: a layer of its own.
COPY pyproject.toml ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > dependencies.txt \
    && pip install --constraint constraints.txt --requirement dependencies.txt
COPY README.md LICENSE ./
COPY broker broker
COPY coordinator coordinator
COPY experiments experiments
COPY fedstream fedstream
COPY runtime runtime
COPY trainer trainer
COPY updater updater
RUN pip install "setuptools==$SETUPTOOLS" \
    && pip install --no-deps --no-build-isolation . \
    && pip check \
    && pip uninstall --yes setuptools pip

FROM python:${PYTHON}
LABEL org.opencontainers.image.title="fedstream" \
      org.opencontainers.image.licenses="Apache-2.0"
# Owned by the user who runs here: a volume of compose takes its owner from the image.
RUN groupadd --gid 10001 fedstream \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin fedstream \
    && install --directory --owner=fedstream --group=fedstream /var/lib/fedstream /run/redis
COPY --from=build /opt/fedstream /opt/fedstream
# /tmp is all that can be written where the root file system can't: caches of matplotlib and torch go there.
ENV PATH=/opt/fedstream/bin:$PATH \
    HOME=/tmp \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# By number, so that Kubernetes can tell that it is not root.
USER 10001:10001
WORKDIR /var/lib/fedstream
EXPOSE 8080
ENTRYPOINT ["fedstream"]
CMD ["--help"]
