"""The federation: server, clients, messages between them, and transports."""
