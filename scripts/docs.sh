#!/usr/bin/env bash
# Builds the docs as a site with search, settings and API reference in build/site, which needs no network to be read. A dead link fails.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

folder=build/docs
wanted=$({ cat docs/requirements.txt "${BASH_SOURCE[0]}"; python --version; } | sha256sum)
if [ "$wanted" != "$(cat $folder/installed 2>/dev/null)" ]; then
  command -v npm >/dev/null || { echo "error: npm is needed, which fetches the scripts of diagrams and search" >&2; exit 1; }
  rm -rf $folder && mkdir -p $folder
  python -m pip install --quiet --disable-pip-version-check --no-deps --target $folder/packages --requirement docs/requirements.txt
  script() {  # from the npm package $1, its file $2, as $3
    npm pack --silent --pack-destination $folder "$1" >/dev/null && tar -xzOf $folder/"${1/@/-}".tgz "package/$2" >$folder/"$3"
  }
  script mermaid@11.17.2 dist/mermaid.min.js mermaid.min.js
  script iframe-worker@1.0.4 shim/index.js iframe_worker.js
  echo "$wanted" >$folder/installed
fi
PYTHONPATH=$folder/packages:. NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict
echo "open build/site/index.html"
