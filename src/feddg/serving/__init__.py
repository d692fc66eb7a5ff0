"""A trained model behind an address: a page to drop images on, and an interface for programs."""
