"""The documented names, modules and signatures."""
