"""Ties to other libraries. Nothing here imports one of them before it is used."""
