"""Documented module paths lie below `collie.models.internlm2`."""
