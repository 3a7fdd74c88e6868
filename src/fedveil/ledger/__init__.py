"""The privacy ledger: what the defenses of a run promise, added up over all that a client sends."""
