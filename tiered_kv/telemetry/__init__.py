"""What operators see, made from events and from nothing else."""
