"""`python -m emu.cli`."""

from emu.cli.main import main

main()
