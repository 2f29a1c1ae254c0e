"""Sweeps: many configurations simulated on all cores, and the best of them."""
