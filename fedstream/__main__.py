"""`python -m fedstream`: the command line."""

from fedstream.cli import main

main()
