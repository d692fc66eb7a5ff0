"""The federation: server, clients, the messages between them, and what carries those."""
