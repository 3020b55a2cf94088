"""Which tokens decode steps select: generated and recorded index streams, and what a hot buffer makes of them."""
