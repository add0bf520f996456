"""The disk store: one directory, one slab file per fingerprint, one SQLite index that the records can rebuild."""
