"""Small helpers that know nothing of models or layouts: calls by parameter name, tensors, random state."""
