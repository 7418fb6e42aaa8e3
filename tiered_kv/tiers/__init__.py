"""What transfers move blocks between: the tiers of a chain, their books and backends, and whose turn it is."""
