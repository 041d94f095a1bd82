"""The version, in a module without imports: setup.py and pyproject.toml read it too."""

__version__ = "0.1.0"
