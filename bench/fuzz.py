"""schemathesis over the server's own OpenAPI document: no request may find a hole.

    python -m bench.fuzz --seconds 120

Starts a server on the toy pair, lets schemathesis make requests that fit the document and requests
that do not, and holds every reply to the document: no 5xx but the deliberate ones, no status,
content type or body that the document does not have. ``make fuzz`` makes the environment that has
schemathesis: it would be a plugin of every pytest beside it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path

from bench.serving import served

CONFIG = Path(__file__).with_name("fuzz.toml")
HOME = Path(__file__).parents[1] / ".venv-fuzz" / "bin"
SERVER = (
    "--model",
    "toy",
    "--draft",
    "toy:script:1,3,0",
    "--max-seconds",
    "20",
    "--cache-mb",
    "64",
)
SEEN = re.compile(r"(\w+) '([^']+)' (\d{3}) ")  # a line of the server's log
SPARE = 60  # seconds beyond its own time that a run may take to say what it found


def command(address: str, seconds: float, seed: int, patience: int = 60) -> list[str]:
    """schemathesis on the server at ``address``, for about so long. Exits where there is none.

    ``patience``: seconds for one answer.
    """
    program = shutil.which("schemathesis", path=str(HOME)) or shutil.which("schemathesis")
    if program is None:
        raise SystemExit("there is no schemathesis here: make fuzz installs it into .venv-fuzz")
    return [
        *(program, f"--config-file={CONFIG}", "run"),
        *(f"{address}/openapi.json", "--max-time", f"{max(1, round(seconds))}"),
        *("--seed", f"{seed}", "--request-timeout", f"{patience}"),
    ]


def main() -> None:
    """Run, and exit as schemathesis does: 1 where it found something."""
    flags = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--seconds", type=float, default=120)
    flags.add_argument("--seed", type=int, default=0)
    given, more = flags.parse_known_args()
    with tempfile.TemporaryFile("w+") as log, served([*SERVER, *more], log) as (server, address):
        asked = command(address, given.seconds, given.seed)
        done = subprocess.run(asked, timeout=given.seconds + SPARE, check=False)
        alive = server.poll() is None
        log.seek(0)
        for line, count in sorted(Counter(SEEN.findall(log.read())).items()):
            print(f"{count:7} {' '.join(line)}")
    if not alive:
        print("the server did not survive it")
    sys.exit(done.returncode if alive else 1)


if __name__ == "__main__":
    main()
