"""The helper: the service in another trust domain that opens sums of updates, and nothing else."""
