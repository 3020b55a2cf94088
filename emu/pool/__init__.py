"""The pool on one device: who holds which blocks."""
