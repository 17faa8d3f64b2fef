"""One file for each API: its requests into the engine's words, and its replies."""
