"""The SAC path: prefill, publish, per-layer sparse reads, write-back."""
