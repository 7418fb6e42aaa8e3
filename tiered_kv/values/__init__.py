"""What is said of blocks: names, layouts, places, plans, results, events, errors. They do nothing."""
