"""Any model as layers: its own forward is replayed, and each layer computes its part of it."""
