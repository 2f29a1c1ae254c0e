"""`fedstream doctor`: checks a deployment and says what to change."""
