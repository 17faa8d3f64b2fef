#!/usr/bin/env bash
# Runs the reference wheel in an environment of its own (it has our import name), writes its golden
# files anew, and holds this package to them. tests/parity/README.md says what is in them.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-reference mlx=.venv-reference-mlx torch=$1
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" 2> >(grep -v '^WARNING: Location' >&2 || true); }
alone() { env -u PYTHONPATH "$@"; }  # a checkout on that path would stand in for the wheel
if [ ! -e "$venv/.installed" ]; then
    "$PY" -m venv "$venv"
    pip install -q --no-deps dflash==0.1.0
    if [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then torch=$torch+cpu; fi
    pip install -q "torch==$torch" || pip install -q "torch==$torch" --retries 1 \
        --extra-index-url https://download.pytorch.org/whl/cpu
    pip install -q transformers==5.15.0 safetensors numpy
    touch "$venv/.installed"
fi
if [ ! -e "$mlx/.installed" ]; then
    "$PY" -m venv "$mlx"
    "$mlx/bin/python" -m pip install -q --no-deps dflash==0.1.0
    "$mlx/bin/python" -m pip install -q "mlx[cpu]==0.32.4" mlx-lm==0.31.3 numpy
    touch "$mlx/.installed"
fi
(cd tests/parity && alone "../../$venv/bin/python" make_reference.py)
(cd tests/parity && alone "../../$mlx/bin/python" make_reference_mlx.py)
draft=$(mktemp -d)
trap 'rm -rf "$draft"' EXIT
"$PY" -m tests.parity.export_draft "$draft"
alone "$venv/bin/python" tests/parity/load_export.py "$draft"
alone "$mlx/bin/python" tests/parity/load_export_mlx.py "$draft"
git --no-pager diff --stat -- tests/parity/golden
"$PY" -m pytest tests/parity
