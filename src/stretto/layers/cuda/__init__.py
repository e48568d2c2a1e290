"""Kernels in CUDA C++, for the few places where they beat those in Triton; each has a Triton path that stays."""
