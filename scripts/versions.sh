#!/usr/bin/env bash
# Runs the tests on another Python and another JAX than the lock's, in an environment of their own in build/versions:
# scripts/versions.sh PYTHON JAX [arguments of pytest], such as scripts/versions.sh python3.12 0.11.2 tests/protocol
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -lt 2 ]; then
  echo "error: name a Python and a version of JAX, such as python3.12 0.11.2" >&2
  exit 2
fi
python=$1 jax=$2
shift 2
folder=build/versions/$("$python" -c 'import sys; print("py%d.%d" % sys.version_info[:2])')-jax$jax
if [ ! -e "$folder/installed" ]; then
  "$python" -m venv "$folder"
  # All else is the lock's, but Flax, which goes with a JAX.
  sed -E "s/^jax==.*/jax==$jax/; /^(jaxlib|flax)==/d" requirements.lock >"$folder/requirements.txt"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$folder/requirements.txt" --editable ".[test]"
  touch "$folder/installed"
fi
source "$folder/bin/activate"
python -c 'import flax, jax, sys; print(f"Python {sys.version.split()[0]}, JAX {jax.__version__}, Flax {flax.__version__}")'
unset PYTHONDONTWRITEBYTECODE
python -m pytest -n "${PYTEST_WORKERS:-$(($(nproc) + 2))}" --dist worksteal "$@"
