#!/usr/bin/env bash
# Builds the API reference from the docstrings: scripts/reference.sh [FOLDER], build/reference by default.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python -m pdoc --docformat google --no-show-source --output-directory "${1:-build/reference}" ddiloco
echo "open ${1:-build/reference}/ddiloco.html"
