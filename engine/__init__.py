"""The inference engine: blocks, scheduler, models, text."""

import os

# torch's OpenMP lets a thread that waits spin for long. With a terminal app, an editor or a compiler on the same
# cores, the spinning thread keeps the one it waits for from running: a step took ten times as long. It must be set
# before torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
