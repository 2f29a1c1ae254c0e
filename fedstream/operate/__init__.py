"""What an operator changes in a run's Redis: dead letters, purging, users, feeding a recording."""
