# Makes .venv with everything that the project needs; sourced by the other scripts. Quick when nothing has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $python is $("$python" --version 2>&1), but Python 3.11 or later is needed (set PYTHON to one)" >&2
  exit 1
}

extra=test
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extra=test,gpu; fi
if [ -e /dev/accel0 ] || { [ -d /dev/vfio ] && [ "${TPU_NAME:-}${TPU_WORKER_ID:-}" ]; }; then extra=test,tpu; fi

wanted=$({ cat setup.py requirements.lock; echo "$extra"; "$python" --version; } | sha256sum)
installed() { [ "$wanted" = "$(cat .venv/installed 2>/dev/null)" ]; }
if ! installed; then
  mkdir -p .venv
  exec 9>.venv/lock  # until the end of this: another may set up at the same time
  "$python" -c "import fcntl; fcntl.flock(9, fcntl.LOCK_EX)"
fi
if ! installed; then
  echo "setting up .venv, once: 2 GB, a minute or more" >&2
  "$python" -m venv .venv
  # The lock names all there is to install, so that several can at once; pip itself compiles on one core.
  xargs -P "$(nproc)" -n 27 .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
    <requirements.lock
  .venv/bin/python -m compileall -qq -j 0 -x "/tests?/" .venv/lib &
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable ".[$extra]"
  # The TPU compiler stands apart: where JAX finds it, it looks for TPUs at every start.
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/tpu_compiler \
    "libtpu==0.0.52" || echo "no TPU compiler for this machine; experiments.compile will do without" >&2
  wait "$!" || true  # some files are of other versions of Python
  echo "$wanted" >.venv/installed
fi
exec 9>&-
source .venv/bin/activate
python -m compileall -q ddiloco experiments configs  # else all processes that begin together do so
