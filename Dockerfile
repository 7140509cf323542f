# One image for every role: docker build -t REGISTRY/ddiloco:1 . (--build-arg=EXTRA=gpu, or none, for other devices)
FROM python:3.11-slim

ARG EXTRA=tpu
WORKDIR /ddiloco

# What changes seldom comes first, so that a change of the code makes one small layer.
COPY setup.py pyproject.toml README.md requirements.lock ./
RUN mkdir ddiloco experiments && touch ddiloco/__init__.py experiments/__init__.py \
    && pip install --no-cache-dir --constraint=requirements.lock ".[${EXTRA}]"

COPY ddiloco ddiloco
COPY experiments experiments
COPY configs configs
# Compiled once here, and not at each start of each role.
RUN python -m compileall -q ddiloco experiments configs

ENV PYTHONUNBUFFERED=1
CMD ["python", "-m", "experiments.train", "--dry_run"]
