"""Observation -> model inputs, and model actions -> robot actions, from LeRobot's and openpi's own files."""
