"""`fedstream ui`: a recorded run in the browser."""
