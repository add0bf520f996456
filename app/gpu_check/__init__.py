"""The prepared check of a GPU: are the kernels right on it, and how fast are they against what the card can do."""
