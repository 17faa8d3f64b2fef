"""Backends, one folder or file each. Siblings never import each other; the registry names them."""
