"""An operator's changes in Redis: dead letters, devices, purging, users, feeding a recording."""
