# samestep for Cloud TPUs, by torch-xla. docs/containers.md says how to build and run it.
#
#   docker build --file docker/tpu.Dockerfile --tag samestep:tpu .

# libtpu, the TPU's driver and compiler, is a wheel, too, so the base is a plain Python.
ARG BASE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

# What is installed, as lists: a layer below is made anew only when its own list has changed.
FROM ${BASE} AS lists
ARG EXTRAS=gcs,tasks,tpu,wandb
WORKDIR /lists
COPY docker/lists.py docker/constraints-tpu.txt constraints.txt constraints-xla.txt pyproject.toml ./
# The first to name a package wins: torch 2.9 needs others than constraints.txt has.
RUN python3 lists.py "${EXTRAS}" constraints-xla.txt constraints-tpu.txt constraints.txt

# The code, as a wheel: the sources and what builds it stay out of the image.
FROM ${BASE} AS code
WORKDIR /code
RUN --mount=type=bind,from=lists,source=/lists,target=/lists \
    python3 -m venv /build && \
    /build/bin/pip install --no-cache-dir --constraint /lists/constraints.txt setuptools
COPY LICENSE README.md pyproject.toml setup.py ./
# The wheel holds them as recipes.
COPY configs configs
COPY data_pipeline data_pipeline
COPY launch launch
COPY samestep samestep
COPY trainer trainer
RUN /build/bin/pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheel .

FROM ${BASE}
# tini: see ENTRYPOINT. Anyone may write to the two folders, so that `--user` can name any user.
RUN apt-get update && \
    apt-get install --yes --no-install-recommends 'tini=0.19.0-1*' && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 10001 samestep && \
    useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /home/samestep samestep && \
    install --directory --mode 1777 /home/samestep /samestep && \
    python3 -m venv /opt/venv

# USER and LOGNAME: torch asks for the user's name, and a uid that `--user` names has none.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/home/samestep \
    LANG=C.UTF-8 \
    LOGNAME=samestep \
    USER=samestep \
    PYTHONUNBUFFERED=1

# Gigabytes, and seldom new: a layer of its own. Most of them are CUDA's libraries, without which PyPI's torch cannot be
# imported; TORCH_INDEX may name an index whose torch has none.
ARG TORCH_INDEX=https://pypi.org/simple
RUN --mount=type=bind,from=lists,source=/lists/torch.txt,target=/lists/torch.txt \
    pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" --constraint /lists/torch.txt numpy setuptools torch

# seqeval comes as source, which takes its version from setuptools-scm.
RUN --mount=type=bind,from=lists,source=/lists,target=/lists \
    pip install --no-cache-dir --constraint /lists/constraints.txt setuptools-scm && \
    pip install --no-cache-dir --no-build-isolation --use-pep517 \
        --extra-index-url "${TORCH_INDEX}" --constraint /lists/constraints.txt --requirement /lists/requirements.txt

# What changes most comes last.
WORKDIR /samestep
COPY --chmod=755 docker/entrypoint.sh /usr/local/bin/entrypoint.sh
COPY LICENSE ./
COPY examples examples
COPY configs configs
RUN --mount=type=bind,from=code,source=/wheel,target=/wheel \
    pip install --no-cache-dir --no-deps --no-index /wheel/*.whl

# A number, as Kubernetes' runAsNonRoot wants to see one.
USER 10001:10001

# The kernel drops signals for which process 1 has no handler, and leaves orphans to it. samestep handles SIGTERM while
# it trains, but not while it imports torch or builds data, and does not wait for processes that are not its own. So
# tini is process 1: it passes each signal on to samestep alone, which tells its workers, and returns samestep's exit
# code. -s: where tini is not process 1, it takes care of orphans all the same.
ENTRYPOINT ["/usr/bin/tini", "-s", "--", "/usr/local/bin/entrypoint.sh"]
