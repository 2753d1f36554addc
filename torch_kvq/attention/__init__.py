"""The seam to transformers: pieces that answer queries, and the tensor handles that stand in for keys and values."""
