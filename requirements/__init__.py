"""Hash-locked requirements: ``make lock`` writes the lists, pip checks installs against them."""
