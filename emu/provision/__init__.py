"""Testbeds: described (spec), planned (plan), made (runner), recorded (state), undone (runner)."""

from emu.provision.testbed import Testbed, testbed

__all__ = ["Testbed", "testbed"]
