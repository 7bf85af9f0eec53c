"""Documented module paths lie below `collie.models.moss_moon`."""
