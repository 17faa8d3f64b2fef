#!/usr/bin/env bash
# Runs the tests of the gguf backend on llama-cpp-python's library instead of xllamacpp's. It comes as
# source and is compiled for 20 minutes or more (cmake and a C++ compiler; no other job needs them), in
# an environment of its own, which also sees the packages of the one that PY names.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-llama-cpp
if [ ! -e "$venv/.installed" ]; then
    "$PY" -m venv "$venv"
    CMAKE_ARGS="${CMAKE_ARGS:--DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF}" \
        "$venv/bin/python" -m pip --disable-pip-version-check install -q 'llama-cpp-python==0.3.36'
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$PY" -c "$site" >"$("$venv/bin/python" -c "$site")/ours.pth"
    touch "$venv/.installed"
fi
PYTHONPATH=$PWD DFLASH_GGUF_LIBRARY=llama-cpp-python "$venv/bin/python" -m pytest \
    tests/backends/test_gguf_{provider,backend,eagle,heads,hybrid}.py tests/facades/test_llama.py \
    tests/conformance/test_gguf_drafts.py tests/conformance/test_sessions.py "$@"
