"""Files that ship with chatkv: the model catalogue, prompts, themes."""
