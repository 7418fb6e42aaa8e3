"""The calls of `TieredKV`, by the occasion on which they are made; each is a few lines over the `Core`."""
