"""Decides who runs what, where and when. Pure functions over snapshots: no torch, no clock, no I/O."""
