#!/usr/bin/env bash
# Serves our engine on two replicas of Ray Serve and holds it to the library's text. Ray gets an
# environment of its own, which also sees the packages of the one that PY names.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-ray
if [ ! -e "$venv/.installed" ]; then
    "$PY" -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check install -q 'ray[serve]==2.60.0' \
        2> >(grep -v '^WARNING: Location' >&2 || true)
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$PY" -c "$site" >"$("$venv/bin/python" -c "$site")/ours.pth"
    touch "$venv/.installed"
fi
PYTHONPATH=$PWD RAY_USAGE_STATS_ENABLED=0 "$venv/bin/python" -m pytest -m ray tests/cluster "$@"
