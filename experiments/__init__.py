"""Experiments: the papers' results and theorems, measured with the rules that run in production."""
