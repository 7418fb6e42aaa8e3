"""Adapters to engines, each imported by whoever uses it and by nothing else here: the engine need not be installed."""
