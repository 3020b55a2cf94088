"""The contract that every medium keeps. A medium's test class subclasses it and overrides `place` and `raw`."""

from __future__ import annotations

from contract_crash import CrashContract
from contract_data import DataContract
from contract_keys import KeysContract
from contract_sharing import SharingContract


class StoreContract(DataContract, KeysContract, SharingContract, CrashContract):
    """All of it; a contract that needs a Capability is skipped where the store lacks it."""
