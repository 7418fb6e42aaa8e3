"""What a storage tier implements, and what a record on it looks like."""
