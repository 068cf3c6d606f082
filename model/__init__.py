"""The minimal decoder, once in PyTorch and once in JAX, assembled from one ``accounting.spec.ModelSpec``."""
