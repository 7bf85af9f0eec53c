"""Documented module paths lie below `collie.models.chatglm2`."""
