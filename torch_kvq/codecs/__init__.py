"""Codecs: rotations, codebooks, statistics. Pure functions and small frozen objects; nothing here knows transformers."""
