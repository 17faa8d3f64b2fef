#!/usr/bin/env bash
# Makes a virtual environment and installs the package for development, pinned, with a CPU torch.
# usage: install.sh VENV TORCH_VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 torch=$2

usable() { # a Python 3.11 to 3.13 that runs
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

if [ ! -x "$venv/bin/python" ]; then
    base=
    for name in python3 python3.13 python3.12 python3.11; do
        if usable "$name"; then base=$name && break; fi
    done
    if [ -z "$base" ]; then
        echo "no Python 3.11, 3.12 or 3.13 found; install one, or run make PYTHON=/path/to/python" >&2
        exit 1
    fi
    echo "making $venv with $("$base" --version)"
    "$base" -m venv "$venv" || {
        rm -rf "$venv"
        echo "python could not make a virtual environment (on Debian: apt-get install python3-venv)" >&2
        exit 1
    }
fi

pip() { # its warnings on index folders that lack a package are noise
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" \
        2> >(grep -v '^WARNING: Location' >&2 || true)
}

# The default torch wheel for Linux on x86-64 brings several GB of CUDA: ask for the CPU build by
# name, first where pip looks anyway, then at PyTorch's own CPU index.
have() { "$venv/bin/python" -c "import importlib.metadata as m, sys
sys.exit(m.version('torch').split('+')[0] != '$torch')" 2>/dev/null; }
if ! have; then
    echo "installing torch $torch (CPU build, about 200 MB)"
    if [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then
        pip install -c constraints/ci.txt "torch==$torch+cpu" 2>/dev/null ||
            pip install -c constraints/ci.txt "torch==$torch+cpu" \
                --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu || {
            echo "no CPU build of torch $torch found for this Python; install one into $venv" \
                "(pip install torch==$torch), then run make again" >&2
            exit 1
        }
    else
        pip install -c constraints/ci.txt "torch==$torch"
    fi
fi
echo "installing dflash and its pinned dependencies"
pip install -q -c constraints/ci.txt -e '.[dev]'
# On Linux xgrammar asks for triton, 290 MB that only its CUDA kernels need.
pip install -q -c constraints/ci.txt --no-deps xgrammar apache-tvm-ffi
