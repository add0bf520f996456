"""The conversation store: chats as names for tips of a message tree, kept in one SQLite file."""
