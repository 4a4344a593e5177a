"""Block-sparse attention: layouts in CSR, the backends that compute with them, and adapters into models."""
