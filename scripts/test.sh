#!/usr/bin/env bash
# Sets up .venv and runs the tests; arguments go to pytest, for example -m slow or tests/protocol.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
unset PYTHONDONTWRITEBYTECODE  # else every worker rewrites all asserts, and again each time
ruff check .
mypy --no-error-summary &  # while the tests are collected
types=$!
# Two workers more than cores: tests of processes and of time-outs wait for half of their time.
python -m pytest -n "${PYTEST_WORKERS:-$(($(nproc) + 2))}" --dist worksteal "$@" || failed=$?
wait "$types"
exit "${failed:-0}"
