"""The preregistered experiment of README.md in this folder."""
