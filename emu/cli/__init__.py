"""The command line: one module per verb, imported when it is called."""

from emu.cli.main import main

__all__ = ["main"]
