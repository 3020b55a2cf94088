"""The serving simulator: the SAC path at the papers' scale, in virtual time, without its bytes."""
