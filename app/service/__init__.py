"""The service process: one per home, owner of model, cache and chats."""
