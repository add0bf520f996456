"""Model catalogue, download and import."""
