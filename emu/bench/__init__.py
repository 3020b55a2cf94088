"""Timing of the data path on this machine, in host time and as ratios within one run."""
