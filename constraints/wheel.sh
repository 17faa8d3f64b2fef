#!/usr/bin/env bash
# Builds the wheel and uses it from a folder of its own: what is not packaged is missed here.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(cd "$(dirname "$PY")" 2>/dev/null && pwd)/$(basename "$PY")
[ -x "$python" ] || python=$(command -v "$PY")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip wheel -q --no-deps --wheel-dir "$folder" . 2> >(grep -v '^WARNING: Location' >&2 || true)
"$python" -m pip install -q --no-deps --target "$folder/site" "$folder"/*.whl
cd "$folder"
PYTHONPATH="$folder/site" "$python" - "$folder/site" <<'CHECK'
import sys
from pathlib import Path

import dflash
from dflash.demo import demo_draft

site = Path(sys.argv[1])
assert Path(dflash.__file__).is_relative_to(site), dflash.__file__
draft = demo_draft()
assert draft.is_relative_to(site), draft
names = sorted(p.name for p in draft.iterdir())
assert "config.json" in names and any(n.endswith(".safetensors") for n in names), names
assert (site / "dflash" / "py.typed").is_file()
assert (site / "dflash" / "serve" / "page" / "index.html").is_file()
print(f"wheel: {len(list(site.rglob('*.py')))} modules, demo draft with {len(names)} files")
CHECK
