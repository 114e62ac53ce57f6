"""A policy behind an OpenAI-compatible endpoint, over our own engine."""
