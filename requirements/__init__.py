"""What is installed, by hash: ``make lock`` writes the lists, pip holds installs to them."""
