"""The commands of `fedstream`, by what they are for; `fedstream/cli.py` puts them together.

What a command needs is imported in it: `--help` and `--version` answer at once.
"""
