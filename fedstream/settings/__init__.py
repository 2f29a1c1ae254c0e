"""The configuration of a run, and the services made from it."""
