"""The method, without arrays: types, the seam, the one decode loop, rules, stats, text."""
