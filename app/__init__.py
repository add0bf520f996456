"""Commands, service, chats, models and the terminal app."""
