#!/usr/bin/env bash
# Sets up .venv and runs the tests; arguments go to pytest, for example -m slow or tests/protocol.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ruff check .
mypy
exec python -m pytest -n "${PYTEST_WORKERS:-auto}" --dist worksteal "$@"
