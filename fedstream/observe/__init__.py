"""What a live run shows: its status, its history, and the pictures and files made from it."""
