"""What commands show of a journal: its pages, replay, bisection."""
