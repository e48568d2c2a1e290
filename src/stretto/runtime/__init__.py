"""Runs models: engine, executors, arenas, graph capture, noise, weights. Knows no model by name."""
