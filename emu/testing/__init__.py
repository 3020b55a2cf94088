"""For tests of your own: a shared memory whose hosts are not coherent, and who forgot which flush or fence.

Write each host of a protocol as a function of one `Host`, give them to `find_violation`, and it plays them against each
other in many deterministic schedules. `docs/testing.md` has an example.
"""

from emu.testing.schedule import find_violation
from emu.testing.shadow import Host, Loaded, Violation

__all__ = ["Host", "Loaded", "Violation", "find_violation"]
