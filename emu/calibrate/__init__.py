"""Media profiles from what users measured: Intel MLC, perftest, our own benchmark."""
