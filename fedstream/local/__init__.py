"""`fedstream run`: every service as a process on this machine, and a run's files."""
