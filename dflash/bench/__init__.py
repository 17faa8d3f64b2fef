"""Speed and acceptance of a pair, measured so that one can believe it: docs/how-to/bench.md."""
