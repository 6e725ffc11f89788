"""How tensors lie in arrays: form, storage, views, and each device's part."""
