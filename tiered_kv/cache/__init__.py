"""The cache: its face, how it is opened and closed, planners and workers."""
