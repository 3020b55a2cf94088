"""Media behind the KV-store interface: one module per medium."""
