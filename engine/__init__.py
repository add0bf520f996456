"""The inference engine: blocks, scheduler, models, text."""
