#!/usr/bin/env bash
# Sets up .venv and trains; arguments go to experiments.train, for example --config=configs/dense.py:small.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[[ " $* " == *" --config="* || " $* " == *" --config "* ]] || set -- --config=configs/dense.py "$@"
exec python -m experiments.train "$@"
