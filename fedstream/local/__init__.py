"""`fedstream run`: every service as a process on this machine, and what a run leaves."""
