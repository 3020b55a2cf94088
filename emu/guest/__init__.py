"""Talking with guests and running beside them; imports little, as it starts once for every program in a guest."""
