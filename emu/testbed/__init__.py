"""Testbeds: described, planned, made, recorded, undone."""
