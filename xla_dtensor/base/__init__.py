"""The ground floor: small mechanisms that know nothing of tensors, meshes or operations."""
