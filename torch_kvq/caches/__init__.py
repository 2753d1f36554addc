"""The transformers ``Cache`` classes and their layers."""
