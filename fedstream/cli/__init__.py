"""The commands of `fedstream`, grouped by purpose; `fedstream/cli/app.py` assembles them.

Commands import what they need inside, so that `--help` and `--version` are fast.
"""
