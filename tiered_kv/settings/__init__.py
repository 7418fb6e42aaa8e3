"""What a cache is made of, as its user says it, and what is wrong with that."""
