"""Backbones, per-task heads, and the fused training path for CUDA devices."""
