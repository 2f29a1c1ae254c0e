"""Experiments: what the papers report and prove, measured with the rules that run in production."""
