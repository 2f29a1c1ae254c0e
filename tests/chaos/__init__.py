"""Real processes, real Redis, real kills: what must hold whatever happens to whom and when."""
