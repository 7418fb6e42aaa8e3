"""Motion: the only code that starts tasks and threads. It decides nothing that the catalog could decide."""
