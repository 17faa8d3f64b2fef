"""Measurements of the demo pair. How and why: docs/how-we-measure.md. Not part of the package."""
