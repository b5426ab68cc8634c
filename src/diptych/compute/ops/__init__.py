"""The operations of a decoder: their contract, the plain reference, and one module per backend."""
